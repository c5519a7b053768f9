"""The command line as `python -m verl_multiturn.cli`."""

import os
import sys

try:
    _HERE = os.getcwd()
except FileNotFoundError:  # `main` reports it
    _HERE = ""
if not _HERE:
    sys.path[:] = [place for place in sys.path if place != ""]
elif os.path.realpath(os.path.join(__file__, *[os.pardir] * 3)) != os.path.realpath(_HERE):
    # Python has put the current folder there, which may be somebody's run; `main` puts it back where it is wanted.
    sys.path[:] = [place for place in sys.path if place not in ("", _HERE)]

from verl_multiturn.cli.main import main

main()
