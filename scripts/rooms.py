"""Print how the rooms of the package import each other: `python -m scripts.rooms [CHECKOUT]`.

A room is a package or a module directly under `verl_multiturn/`; `docs/reference/rooms.md` has the rooms in
their order, and those of `verl_bridge` in a table of their own. A room may import those above it. Printed are the
arrows of each room, those that run up, and files that import each other in a circle; the last line is one JSON object.
"""

import ast
import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BRIDGE = "verl_bridge"


def order_of(root: Path, inside: str = "") -> list[str]:
    """Return the rooms of the package, or those inside of one, in their order; none without such a table."""
    page = _page(root)
    heading = f"# The rooms of `{inside}`" if inside else "# The rooms"
    table = page.partition(f"{heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `(\w+)(?:/|\.py)` \|", table, re.MULTILINE)


def _page(root: Path) -> str:
    """Return the page that has the tables; before it there was one, they were in `architecture.md`."""
    page = root / "docs" / "reference" / "rooms.md"
    return (page if page.is_file() else root / "docs" / "understand" / "architecture.md").read_text(encoding="utf-8")


@functools.cache
def modules(root: Path = ROOT) -> Mapping[str, Path]:
    """Return the files of the package by their dotted name, without `verl_multiturn.` itself."""
    package = root / "verl_multiturn"
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del names[""]
    return names


@functools.cache
def names_of(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a file imports, a module's names with the module before them: all, and those on top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at = max((number for number, part in enumerate(path.parts) if part == "verl_multiturn"), default=len(path.parts))
    package = path.parts[at:-1]
    return _names_in(ast.walk(tree), package), _names_in(tree.body, package)


def _names_in(nodes: Iterable[ast.AST], package: Sequence[str]) -> frozenset[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return for each module the modules of this package that it imports."""
    known = modules(root)
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        ours = {
            name.removeprefix("verl_multiturn.") for name in names_of(path)[0] if name.startswith("verl_multiturn.")
        }
        found[module] = {name if name in known else name.rpartition(".")[0] for name in ours} & known.keys() - {module}
    return found


def strange(root: Path = ROOT) -> list[str]:
    """Return the imports from this package of no known module, nor of a name in one: such an arrow is not seen."""
    known = modules(root)
    return [
        f"{module} imports {name}"
        for module, path in known.items()
        for name in sorted(names_of(path)[0])
        if name.startswith("verl_multiturn.")
        and name != "verl_multiturn.__version__"
        and not {name.removeprefix("verl_multiturn."), name.rpartition(".")[0].removeprefix("verl_multiturn.")}
        & known.keys()
    ]


def arrows(root: Path = ROOT, inside: str = "") -> dict[tuple[str, str], list[str]]:
    """Return which imports go from one room to another, by both rooms.

    Args:
        root: The checkout.
        inside: The room whose own rooms are meant; "": those of the package.
    """
    found: dict[tuple[str, str], list[str]] = {}
    depth = 1 if inside else 0
    for module, others in imports(root).items():
        for other in others:
            ours, theirs = module.split("."), other.split(".")
            if inside and (ours[0] != inside or theirs[0] != inside or min(len(ours), len(theirs)) < 2):
                continue
            if ours[depth] != theirs[depth]:
                found.setdefault((ours[depth], theirs[depth]), []).append(f"{module} imports {other}")
    return found


def upward(root: Path = ROOT, inside: str = "") -> list[str]:
    """Return the imports that run up: from a room to one that comes behind it."""
    order = order_of(root, inside)
    return [
        line
        for (room, other), lines in arrows(root, inside).items()
        if order.index(room) < order.index(other)
        for line in lines
    ]


def circle(root: Path = ROOT) -> list[str]:
    """Return the files that import each other in a circle, or are behind one."""
    rest = imports(root)
    while free := [module for module, others in rest.items() if not others & rest.keys()]:
        for module in free:
            del rest[module]
    return sorted(rest)


def main(root: Path) -> None:
    """Print the arrows of a checkout."""
    by_room: dict[str, list[str]] = {}
    for room, other in sorted(arrows(root)):
        by_room.setdefault(room, []).append(other)
    for room, others in by_room.items():
        print(f"{room:<16} {len(others):>3}  {' '.join(others)}")
    found = {
        "rooms": len(order_of(root)),
        "arrows": len(arrows(root)),
        "up": upward(root),
        "arrows_in_bridge": len(arrows(root, BRIDGE)),
        "up_in_bridge": upward(root, BRIDGE) if order_of(root, BRIDGE) else None,
        "circle": circle(root),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
