"""The HTTP server of a worker: connections, bodies and exchanges."""
