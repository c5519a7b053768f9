"""The processes of a run on a CPU: their environment variables, and the process that they are forked from.

The launcher starts them before verl is imported, so nothing here imports verl, Ray or SGLang.
"""
