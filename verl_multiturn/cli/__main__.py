"""The command line as `python -m verl_multiturn.cli`."""

from verl_multiturn.cli.main import main

main()
