"""SGLang's server, as a program: `python -P serve_sglang.py PARENT ARGUMENTS`, with the fields of `ServerArgs` as JSON.

verl gives SGLang's engine the fields of `ServerArgs`, and a recipe's `engine_kwargs` are such fields; SGLang's own
command line has other names for some of them. It is run by its path, since to import this room is to import verl.
"""

from __future__ import annotations

import json
import os
import sys

from verl_multiturn.processes.system import end_with_parent


def main() -> None:
    """Serve until this process or its parent is ended, and end all that it started with it."""
    if not end_with_parent(int(sys.argv[1])):
        return
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(ServerArgs(**json.loads(sys.argv[2])))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
