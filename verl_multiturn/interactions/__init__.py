"""Simulated users and environments: they answer a turn that calls no tool. Knows neither verl, Ray nor SGLang."""
