"""Estimators of advantages, without tensors and without verl."""
