"""Documents of some folders of records, as plain JSON: `verl-multiturn show` and the viewer print the same."""
