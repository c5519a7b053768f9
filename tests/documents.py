"""The code blocks of the README and the docs, and the commands in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "requirements").glob("*.md"),
        *(ROOT / "tests").glob("*.md"),
        *(ROOT / "recipes").rglob("README.md"),
    ]
)

# A command is not run where a comment excludes it: at its end, on the line above it, or (`<!-- … -->`) above its block.
_NOT_RUN = re.compile(r"\bGPUs\b|\bGPU environment\b|\bminutes\b|\bhours\b|\btests\b|\ba gateway\b")
_FENCE = re.compile(r"( *)(`{3,})(\w*) *")
_FILE = re.compile(r"# ([\w-]+\.\w+)")
_WORDS = "verl-multiturn |python |python3 |bash |sh |pip |uv |git |.venv/bin/"
COMMAND = re.compile(rf"(?:{_WORDS.replace('.', '[.]')})\S")
_SHELL = ("bash", "sh", "shell", "console")


@dataclass
class Block:
    """A fenced block of a document."""

    language: str
    lines: list[str]
    number: int
    """Number of its first line in the document."""
    before: str
    """The last line above the block that is not empty."""
    output: list[str] | None = None
    """Lines that a block of commands prints, according to the `text` block right below it; None without one."""

    @property
    def is_shell(self) -> bool:
        return self.language in _SHELL

    @property
    def file(self) -> str:
        """Name of the file that the block shows, from its first line; "" if the block is not a file."""
        found = _FILE.fullmatch(self.lines[0]) if self.lines else None
        return found[1] if found and not self.is_shell else ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass
class Command:
    """A command of a document, without its comment."""

    text: str
    not_run: bool
    number: int


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document, in order."""
    found: list[Block] = []
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    before, after_block, index = "", False, 0
    while index < len(lines):
        fence = _FENCE.match(lines[index])
        if fence is None:
            if lines[index].strip():
                before, after_block = lines[index].strip(), False
            index += 1
            continue
        end = next(i for i in range(index + 1, len(lines)) if lines[i].strip() == fence[2])
        content = textwrap.dedent("\n".join(lines[index + 1 : end])).splitlines()
        block = Block(fence[3], content, index + 2, before)
        if after_block and block.language == "text" and found[-1].is_shell:
            found[-1].output = content
        found.append(block)
        before, after_block, index = "", True, end + 1
    return found


def commands(block: Block) -> list[Command]:
    """Return the commands of a shell block; a continued command is one command."""
    found: list[Command] = []
    marked = block.before.startswith("<!--") and bool(_NOT_RUN.search(block.before))
    above = ""
    lines = iter(enumerate(block.lines, block.number))
    for number, line in lines:
        while line.endswith("\\"):
            line = f"{line[:-1].rstrip()} {next(lines)[1].strip()}"
        text, comment = _apart(line)
        if not text:
            above = comment
            continue
        found.append(Command(text, marked or bool(_NOT_RUN.search(above) or _NOT_RUN.search(comment)), number))
        above = ""
    return found


def _apart(line: str) -> tuple[str, str]:
    """Split a shell line into the command and its comment."""
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index].strip(), line[index + 1 :].strip()
    return line.strip(), ""


def mentioned(document: Path) -> list[str]:
    """Return the commands in running text and tables: texts in backticks that begin as a command does."""
    text = (ROOT / document).read_text(encoding="utf-8")
    outside = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        " ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside) if COMMAND.match(" ".join(code.split()))
    ]
