"""Figures of evaluations: how good a model is, how sure that is, and how it differs from another."""
