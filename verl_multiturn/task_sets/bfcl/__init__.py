"""BFCL's multi-turn dialogues (Berkeley Function Calling Leaderboard): 800 dialogues in eight simulated worlds.

`package.py` reads the data of the installed `bfcl-eval`, `worlds.py` plays the calls, `episode.py` judges each turn of
the user, `user.py` is the interaction that plays the user, and `tools.py` has the functions as tools.
"""
