"""Say what of a patch does not count because by it a module would be found in another place in imports.

`git apply --summary PATCH | python3 counted.py NAMES` prints an option `--exclude=PATH` a line. NAMES is JSON:
`modules`, names of those of Python and of those that run tests, and `never`, globs of names that never count. It starts
in the repository before the patch is applied.

This file is copied into tasks whose image may have an old Python: it needs 3.6, and the standard library alone. The
rule is that of `workspaces/left.py`, which also knows the installed packages, the hidden tests by their names, and the
folders in which imports begin. Here any folder may have tests below it.
"""

import fnmatch
import json
import os
import re
import sys

_CHANGED = re.compile(r" (create|delete) mode \d+ (.+)")


def pattern(globs: "list[str]") -> "re.Pattern[str]":
    """Return globs of names as one pattern."""
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs))


def shadows(path: str, names: "set[str]", never: "re.Pattern[str]") -> bool:
    """Tell whether a new file would be imported in the place of one of the modules, or of one that never counts."""
    parts = path.split("/")
    if parts[1:] and parts[-1] == "__init__.py" and never.match(parts[-2].lower() + ".py"):
        return True
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


def exposing(made: "set[str]", gone: "set[str]", names: "set[str]", never: "re.Pattern[str]") -> "list[str]":
    """Return each `__init__.py`, made or deleted, by which pytest may begin imports beside one of the modules."""
    made, gone, exposed, own = set(made), set(gone), set(), set()
    for path in made:
        module = path[: -len("/__init__.py")] if path.endswith("/__init__.py") else path
        if path.endswith(".py") and _is_one(os.path.basename(module), names, never):
            own.add(os.path.dirname(module))

    def has_init(folder: str) -> bool:
        path = os.path.join(folder, "__init__.py")
        return path in made or (path not in gone and os.path.isfile(path))

    def holds_one(folder: str) -> bool:
        if folder in own:
            return True
        there = os.listdir(folder) if os.path.isdir(folder) else []
        there = [name for name in there if os.path.join(folder, name) not in gone and _is_one(name, names, never)]
        return any(name.endswith(".py") or has_init(os.path.join(folder, name)) for name in there)

    def depth(path: str) -> int:
        return path.count("/")

    for path in sorted((path for path in gone if path.endswith("/__init__.py")), key=depth, reverse=True):
        if holds_one(os.path.dirname(path)):
            exposed.add(path)
            gone.discard(path)
    for path in sorted((path for path in made if path.endswith("/__init__.py")), key=depth):
        folder = root = os.path.dirname(path)
        while root and has_init(root):
            root = os.path.dirname(root)
        if os.path.isdir(folder) and root and holds_one(root):
            exposed.add(path)
            made.discard(path)
    return sorted(exposed)


def _is_one(name: str, names: "set[str]", never: "re.Pattern[str]") -> bool:
    """Tell whether a file or folder is one of the modules, and its name is none that never counts."""
    return (name[: -len(".py")] if name.endswith(".py") else name) in names and not never.match(name.lower())


def main(names: str) -> None:
    """Print the options for the changes of a patch, which the standard input tells."""
    with open(names, encoding="utf-8") as given:
        read = json.load(given)
    modules, never = set(read["modules"]), pattern(read["never"])
    changed = {"create": set(), "delete": set()}  # type: dict[str, set[str]]
    for found in filter(None, map(_CHANGED.fullmatch, sys.stdin.read().split("\n"))):
        if not any(never.match(part) for part in found.group(2).lower().split("/")):
            changed[found.group(1)].add(found.group(2))
    excluded = {path for path in changed["create"] if shadows(path, modules, never)}
    excluded.update(exposing(changed["create"] - excluded, changed["delete"], modules, never))
    for path in sorted(excluded):
        print("--exclude=" + path)


if __name__ == "__main__":
    main(sys.argv[1])
