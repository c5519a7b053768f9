"""JSON Schemas: compiled for the checks of arguments, without a look at the net."""
