"""15 agent programs, unmodified, against the endpoint of `verl_multiturn.proxy`.

`environments` installs each program, pinned, into an environment of its own; `programs` knows how each is started and
pointed here; `policies` has the model's answers to it; `sessions` serves it and accounts for every completion.
"""
