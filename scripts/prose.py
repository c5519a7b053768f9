"""Count the phrases of our own dialect in docstrings, comments, messages and Markdown: `python -m scripts.prose`.

A phrase is listed because engineers use another word for it; `docs/contributing.md` names some of these. Each hit is
printed with its file and line, then a table of totals. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PHRASES = {
    "what": r"what(?![- ]if\b)(?=[ \n])(?![^.;:]*\?)",  # in no question
    "say": r"says?|said|saying",
    "tell": r"tells?|told|telling",
    "is no": r"(?<!there )(?:is|are|was|were) no(?! (?:longer|more|less|fewer|later|earlier)\b)(?=[ \n])",
    "stand": r"stands?(?!-in)|stood|standing",
    "whoever": r"nobody|whoever|for ever",
    "met": r"met",
    "judged": r"judged",
    "touched": r"touched",
    "asked": r"asked",
    "left": r"left(?!-)(?! to right)",
}
_FOUND = re.compile(r"\b(?:" + "|".join(f"({pattern})" for pattern in PHRASES.values()) + r")\b", re.IGNORECASE)
_CODE = re.compile(r"^ *```.*?^ *```|``?[^`\n]+``?", re.MULTILINE | re.DOTALL)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def hits(text: str) -> Iterator[tuple[str, int]]:
    """Give each phrase of a text with the number of lines before it; code in backticks is skipped."""
    prose = _CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), text)
    for found in _FOUND.finditer(prose):
        yield list(PHRASES)[(found.lastindex or 1) - 1], prose.count("\n", 0, found.start())


def texts(path: Path) -> Iterator[tuple[str, str, int]]:
    """Give the texts of a file: their place (docstring, comment, message, page), the text and its first line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield "page", source, 1
    elif path.suffix == ".py":
        yield from _of_python(source)
    else:  # comments of YAML
        for number, line in enumerate(source.splitlines(), 1):
            yield "comment", line.partition("#")[2], number


def _of_python(source: str) -> Iterator[tuple[str, str, int]]:
    tree = ast.parse(source)
    notes = {  # docstrings, those of fields included
        id(node.value)
        for parent in ast.walk(tree)
        if isinstance(parent, _DOCUMENTED)
        for node in parent.body
        if isinstance(node, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in notes:
                yield "docstring", node.value, node.lineno
            elif len(node.value.split()) > 2:
                yield "message", node.value, node.lineno
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "comment", token.string, token.start[0]


def count(root: Path, under: list[str]) -> Iterator[tuple[str, str, int, str]]:
    """Give each hit below a checkout: the place of its text, the file, the line and the phrase.

    Texts of tests that are neither docstrings nor comments are data. The CHANGELOG and vendored files are skipped.
    """
    listed = ["git", "-C", str(root), "ls-files", "--", *(under or ["."])]
    done = subprocess.run(listed, capture_output=True, text=True, check=True, encoding="utf-8")
    for name in done.stdout.splitlines():
        if not name.endswith((".py", ".md", ".yaml")) or name == "CHANGELOG.md" or "results/" in name:
            continue
        for place, text, line in texts(root / name):
            if place == "message" and name.startswith("tests/"):
                continue
            for phrase, below in hits(text):
                yield place, name, line + below, phrase


def main() -> None:
    """Print the hits, the totals for each phrase and place, and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("under", nargs="*", help="paths in the checkout; all of it by default")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: here)")
    parser.add_argument("--quiet", action="store_true", help="print the totals alone")
    options = parser.parse_args()
    table: Counter[tuple[str, str]] = Counter()
    for place, name, line, phrase in count(options.root, options.under):
        table[phrase, place] += 1
        if not options.quiet:
            print(f"{name}:{line}: {phrase} ({place})")
    places = ["docstring", "comment", "message", "page"]
    print("".join(f"{head:>11}" for head in ["phrase", *places, "all"]))
    sums = {phrase: [table[phrase, place] for place in places] for phrase in PHRASES}
    for phrase, row in sums.items():
        print("".join(f"{cell:>11}" for cell in [phrase, *row, sum(row)]))
    by_place = {place: sum(row[at] for row in sums.values()) for at, place in enumerate(places)}
    by_phrase = {phrase: sum(row) for phrase, row in sums.items()}
    print(json.dumps({"phrases": by_phrase, "places": by_place, "total": table.total()}))


if __name__ == "__main__":
    main()
