"""Convert a run's records into what other programs read: tables, trajectories and traces; a file for each form."""
