"""`verl-multiturn show`: a run, a step, a group or a conversation, for a terminal and for programs."""
