"""SGLang's server, as a program: `python -P serve_sglang.py ARGUMENTS`, with the fields of `ServerArgs` as JSON.

verl gives SGLang's engine the fields of `ServerArgs`, and a recipe's `engine_kwargs` are such fields; SGLang's own
command line has other names for some of them. It is run by its path, since to import this room is to import verl. The
guard beside it ends the processes that remain (`processes/guard.py`).
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Serve until this process is ended."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
