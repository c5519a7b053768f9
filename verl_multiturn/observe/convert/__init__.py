"""Convert a run's records into formats of other programs: tables, trajectories and traces; a file for each form."""
