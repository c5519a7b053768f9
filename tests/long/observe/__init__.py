"""Synthetic runs: is a fault explained, and do other programs read what is converted?"""
