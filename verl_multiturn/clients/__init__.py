"""Clients of services over HTTP: connections through one place, and a language model behind an endpoint."""
