"""Count the class names that the package uses more than once: `python -m scripts.names`.

A leading underscore does not count. Each name is printed with its places, a `*` before those that are public twice. The
last line is one JSON object.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "verl_multiturn"


def doubles(package: Path = PACKAGE) -> dict[str, list[tuple[str, str]]]:
    """Return the names of two or more classes, each with the file and the name as written, by name."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append((path.relative_to(package).as_posix(), node.name))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def is_public(places: list[tuple[str, str]]) -> bool:
    """Return whether at least two of the classes are public."""
    return sum(not name.startswith("_") for _, name in places) > 1


def main() -> None:
    """Print the names and their places."""
    found = doubles()
    for name, places in found.items():
        print("*" if is_public(places) else " ", name, *(f"{file}:{written}" for file, written in places))
    print(json.dumps({"twice": len(found), "public_twice": sum(map(is_public, found.values()))}))


if __name__ == "__main__":
    main()
