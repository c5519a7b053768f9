"""Say what of a patch does not count because it would take the place of another module in imports.

`git apply --summary PATCH | python3 counted.py NAMES` prints an option `--exclude=PATH` a line. NAMES is JSON: names of
modules, of Python and of those that run tests. It starts in the repository before the patch is applied.

This file is copied into tasks whose image may have an old Python: it needs 3.6, and the standard library alone. The
rule is that of `workspaces/left.py`, which also knows the installed packages.
"""

import json
import os
import re
import sys

_CREATED = re.compile(r" create mode \d+ (.+)")


def shadows(path: str, names: "set[str]") -> bool:
    """Tell whether a new file would be imported in the place of one of the modules."""
    parts = path.split("/")
    for depth, part in enumerate(parts):
        place = os.path.join(".", *parts[:depth])
        there = os.listdir(place) if os.path.isdir(place) else []
        is_new_folder = depth < len(parts) - 1 and not os.path.isdir(os.path.join(place, part))
        becomes_package = parts[depth + 1 :] == ["__init__.py"]
        module = part[: -len(".py")] if part.endswith(".py") else part
        if is_new_folder or becomes_package or module != part:
            package = os.path.join(place, module, "__init__.py")
            known = module + ".py" in there or os.path.isfile(package)
            if (depth == 0 or "__init__.py" not in there) and not known and module in names:
                return True
        if is_new_folder:
            return False
    return False


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        modules = set(json.load(given))
    for line in sys.stdin.read().split("\n"):
        created = _CREATED.fullmatch(line)
        if created and shadows(created.group(1), modules):
            print("--exclude=" + created.group(1))
