"""Canaries for scripts: programs of ours in files that may change, by which `check_task` learns whether it starts.

A program that a script starts runs as its user. It can write the reward and lock it, and read the expected values in
`/tests`. So a script that starts changeable files needs twins, and one that only reads files needs none. Which of both
it is, a run over the repair shows in whose files there are canaries:
- a file of a language that is known by its name or its first line gets one in this language, its text stays;
- any other file may be read as data or as a program of any language that the script names. So in one run it has a
  canary for the shell, and in one more for each of these languages;
  In one more, each text in it is a command (of JSON, or behind `=` or `:`), and in one more bash runs it where it is
  calculated with, or evaluated;
- a file that is not there gets one where a glob or a word of the script names it.

Nothing was started: no canary ran, and there was a place for each language that the script names. There is no place:
the script names a program whose language has no canary here; or it names a program that may be changed, whose canary
did not run, so it may look at the text before it starts that. Then the answer is unknown.
"""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.verdicts.globs import Globs
from verl_multiturn.verdicts.import_places import ImportNames, why_never
from verl_multiturn.verdicts.script_run import REWARD_FOLDER
from verl_multiturn.verdicts.task import ScriptVerdict, Task
from verl_multiturn.workspaces.workspace import FOLDER

_NO_CANARY = (
    *("ruby", "php", "lua", "luajit", "Rscript", "julia", "java", "javac", "groovy", "scala", "kotlinc", "go", "cargo"),
    *("rustc", "swift", "dotnet", "ghc", "runghc", "ocaml", "erl", "elixir", "fish", "csh", "tcsh", "deno", "bun"),
    *("sqlite3", "psql", "mysql", "gdb", "vim", "vi", "ex", "ed", "emacs", "m4", "dc", "expect", "cmake", "ninja"),
)
"""Programs that run a file's text, in languages that have no canary here."""
_WORDS = "|".join(_NO_CANARY)
_BY_SHELL = re.compile(
    r"(?:^|[;&|({`!]|\$\(|\b(?:then|do|else|if|elif|while|until|exec|time|nohup|xargs|command|env|timeout\s+\S+))"
    rf"[ \t]*(?:\w+=\S*[ \t]+)*(?:[\w./-]*/)?({_WORDS})(?=[\s;&|)<>`]|$)",
    re.MULTILINE,
)
"""Where a command begins with such a word."""
_BY_PYTHON = re.compile(rf"[\"'](?:[\w./-]*/)?({_WORDS})(?=[\"'\s])")
_STARTS = re.compile(r"\b(?:subprocess|system|popen|spawn\w*|exec[lv]\w*)\b")
_IMPORT = re.compile(r"\b(?:import|from|-m)[ \t]+(\w[\w.]*(?:[ \t]*,[ \t]*\w[\w.]*)*)")
_VALUE = re.compile(r"(?m)^([ \t]*[\w.\"'-]+[ \t]*[:=][ \t]*)([\"']?)\S.*$")
_SCRIPTS = (".sh", ".bash", ".py", ".pl", ".awk", ".mk")
_APP = re.compile(rf"^(?:/app|{re.escape(FOLDER)})/+")
_MOST_NEW = 400


def _line(text: str, line: str) -> str:
    """Return a text with a line at its beginning, but behind the one that names its interpreter."""
    if not text.startswith("#!"):
        return f"{line}\n{text}"
    first, _, rest = text.partition("\n")
    return f"{first}\n{line}\n{rest}"


def _in_python(text: str, command: str) -> str:
    """Return a Python program with a canary behind its docstring and its imports of `__future__`."""
    line = f'__import__("os").system("{command}")'
    text = text.removeprefix("\ufeff")
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return _commented(text, line, "#")
    count = 0
    while count < len(body) and _is_head(body[count]):
        count += 1
    if not count:
        return _line(text, line)
    end = body[count - 1].end_lineno or 0
    if count < len(body) and body[count].lineno == end:
        return f"{line}\nexec(compile({text!r}, __file__, 'exec'))\n"
    lines = text.splitlines(keepends=True)
    head = "".join(lines[:end])
    return f"{head if head.endswith(chr(10)) else f'{head}{chr(10)}'}{line}\n{''.join(lines[end:])}"


def _is_head(node: ast.stmt) -> bool:
    """Return whether a statement has to be before all others."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _commented(text: str, line: str, sign: str) -> str:
    indent = text[: len(text) - len(text.lstrip(" \t"))]  # it may be a part of a program
    return "\n".join([indent + line, *(f"{sign} {each}" for each in text.splitlines())]) + "\n"


@dataclass(frozen=True)
class _Language:
    """A language, and how a canary is put into a program of it.

    Attributes:
        names: Patterns of file names, without the folders.
        programs: Words by which a script names it, as a pattern.
        place: Returns a program of the language with a canary that starts a command.
        alone: Likewise of a text that may be data: the text after the canary does not keep it from running.
    """

    names: str
    programs: str
    place: Callable[[str, str], str]
    alone: Callable[[str, str], str]


def _languages() -> dict[str, _Language]:
    def with_line(form: str, sign: str = "") -> tuple[Callable[[str, str], str], Callable[[str, str], str]]:
        def place(text: str, command: str) -> str:
            return _line(text, form.replace("COMMAND", command))

        def alone(text: str, command: str) -> str:
            return _commented(text, form.replace("COMMAND", command), sign)

        return place, alone if sign else place

    _, alone = with_line('__import__("os").system("COMMAND")', "#")
    node = (
        'typeof require === "function" ? require("child_process").execSync("COMMAND") '
        ': import("child_process").then((found) => found.execSync("COMMAND"));'
    )
    c = (
        '#ifdef __cplusplus\nextern "C"\n#endif\nint system(const char *);\n'
        '__attribute__((constructor)) static void canary(void) { if (system("COMMAND")) {} }'
    )
    return {
        "shell": _Language(r"\.(?:sh|bash|env|profile)$|^\.env$", r"(?:ba|da|z|k)?sh", *with_line("COMMAND")),
        "python": _Language(r"\.pyw?$", r"(?:python|pytest|pypy)[\d.]*", _in_python, alone),
        "make": _Language(r"^(?:GNU)?makefile$|\.mk$", "make", *with_line("CANARY := $(shell COMMAND)")),
        "perl": _Language(r"\.(?:pl|pm|t)$", r"perl[\d.]*|prove", *with_line('BEGIN { system("COMMAND"); }')),
        "awk": _Language(r"\.awk$", "[gmn]?awk", *with_line('BEGIN { system("COMMAND") }', "#")),
        "sed": _Language(r"\.sed$", "g?sed", *with_line("1e COMMAND", "#")),
        "node": _Language(r"\.[cm]?[jt]s$", r"node(?:js)?|npm|npx|tsx", *with_line(node, "//")),
        "c": _Language(r"\.(?:c|h|cc|hh|cpp|hpp|cxx)$", r"g?cc|[gc]\+\+|clang(?:\+\+)?|tcc", *with_line(c, "//")),
        "tcl": _Language(r"\.(?:tcl|exp)$", "tclsh|wish", *with_line("exec COMMAND", "#")),
        "pickle": _Language(
            r"\.(?:pkl|pickle|joblib)$",
            "pickle|joblib|dill|shelve",
            *[lambda text, command: f"cos\nsystem\n(S'{command}'\ntR."] * 2,
        ),
        "yaml": _Language(
            r"$^", "yaml", *[lambda text, command: f'!!python/object/apply:os.system ["{command}"]\n'] * 2
        ),
    }


_LANGUAGES = _languages()
_SHELL, _MAKE = _LANGUAGES["shell"], _LANGUAGES["make"]


@dataclass(frozen=True)
class CanaryRun:
    """Files of one run: the repair with canaries.

    Attributes:
        changed: Content of the files that have one.
        places: Paths of these, in the order of the numbers that their canaries leave.
    """

    changed: Mapping[str, bytes]
    places: Sequence[str]


@dataclass(frozen=True)
class Canary:
    """A program that reports its start, writes the reward, and locks it.

    Attributes:
        folder: Where it lies in a workspace; the name is drawn.
        reward: Its reward; no script writes it.
    """

    folder: str = field(default_factory=lambda: f"/tmp/{secrets.token_hex(8)}")
    reward: float = field(default_factory=lambda: (1 + secrets.randbelow(2**20)) / 2**21)

    @property
    def command(self) -> str:
        """Return its interpreter."""
        return f"{self.folder}/run"

    def files(self) -> dict[str, bytes]:
        """Return its files."""
        text = f"""#!/bin/sh
echo "$1" >> {self.folder}/started
exec > /dev/null 2>&1
cd {REWARD_FOLDER} || exit 0
rm -rf reward.txt reward.json
echo {self.reward!r} > reward.txt
echo '{{"reward": {self.reward!r}}}' > reward.json
chmod 444 reward.txt reward.json
chmod 555 .
exit 0
"""
        return {"run": text.encode()}


def why_no_place(task: Task, verdict: ScriptVerdict, tree: Mapping[str, bytes]) -> str:
    """Return which program without a canary a script names; empty if it names none.

    Args:
        task: The task.
        verdict: Its verdict.
        tree: The repair.
    """
    allowed = Globs(task.allowed)
    scripts = _scripts(verdict.files)
    said = "\n".join(scripts.values())
    for path, content in tree.items():
        is_named = os.path.basename(path) in said or (_of(path, "") is _MAKE and re.search(r"\bmake\b", said))
        if is_named and not allowed.match(path):
            scripts |= _scripts({path: content.decode("utf-8", "replace")})
    for path, text in scripts.items():
        pattern = _BY_PYTHON if path.endswith(".py") else _BY_SHELL
        if (found := pattern.search(text)) and (pattern is _BY_SHELL or _STARTS.search(text)):
            return found[1]
    return ""


def canary_runs(
    task: Task, verdict: ScriptVerdict, tree: Mapping[str, bytes], names: ImportNames, canary: Canary
) -> Iterator[CanaryRun]:
    """Yield the files of each run.

    Args:
        task: The task.
        verdict: Its verdict.
        tree: The repair.
        names: Those in the row's tree.
        canary: The canary.
    """
    allowed = Globs(task.allowed)
    texts = {
        path: tree[path].decode("utf-8", "surrogateescape")
        for path in sorted(tree)
        if allowed.match(path) and not why_never(path, names)
    }
    forms = {path: _of(path, text) for path, text in texts.items()}
    data = [path for path in texts if forms[path] is None]
    scripts = _scripts(verdict.files)
    new = _new_paths(task, scripts, tree, names, allowed)
    places = [*texts, *new]
    numbers = {path: number for number, path in enumerate(places)}

    def run(placed: Mapping[str, str]) -> CanaryRun:
        return CanaryRun({path: text.encode("utf-8", "surrogateescape") for path, text in placed.items()}, places)

    def command(path: str) -> str:
        return f"{canary.command} {numbers[path]}"

    if texts:
        yield run({path: (forms[path] or _SHELL).place(text, command(path)) for path, text in texts.items()})
    if data or new:  # a whole file may be the name of a program
        placed = {path: (_of(path, "") or _SHELL).alone("", command(path)) for path in new}
        yield run(dict.fromkeys(data, f"{canary.command}\n") | placed)
    values = {path: _with_values(texts[path], command(path)) for path in data}
    if changed := {path: text for path, text in values.items() if text != texts[path]}:
        yield run(changed)
    said = "\n".join([*scripts.values(), *(text for path, text in texts.items() if forms[path])])
    for language in _LANGUAGES.values():
        unknown = [*data, *(path for path in new if _of(path, "") is None)]
        if unknown and language is not _SHELL and re.search(rf"(?<![\w-])(?:{language.programs})(?![\w-])", said):
            yield run({path: language.alone(texts.get(path, ""), command(path)) for path in unknown})
    if data:  # bash runs the code in an index of a number, and in a text that it evaluates
        yield run({path: f"canary[$({command(path)})]\n" for path in data})


def named_program(task: Task, verdict: ScriptVerdict, tree: Mapping[str, bytes], names: ImportNames) -> str:
    """Return a program that may be changed and that a script names; empty if there is none.

    If no canary in it was started, its text may have been looked at first.

    Args:
        task: The task.
        verdict: Its verdict.
        tree: The repair.
        names: Those in the row's tree.
    """
    allowed = Globs(task.allowed)
    said = "\n".join(_scripts(verdict.files).values())
    for path, content in sorted(tree.items()):
        is_named = re.search(rf"(?<![\w.-]){re.escape(os.path.basename(path))}(?![\w.-])", said)
        is_allowed = is_named and allowed.match(path) and not why_never(path, names)
        if is_allowed and _of(path, content.decode("utf-8", "replace")) is not None:
            return path
    return ""


def _with_values(text: str, command: str) -> str:
    """Return data with a command in the place of each text in it: of JSON, or behind `=` or `:` of a line."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(each) for key, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return command if isinstance(value, str) else value

    try:
        return json.dumps(replaced(json.loads(text)), indent=2) + "\n"
    except (ValueError, RecursionError):
        return _VALUE.sub(lambda found: f"{found[1]}{found[2]}{command}{found[2]}", text)


def _of(path: str, text: str) -> _Language | None:
    """Return the language of a file; None where its name and its first line do not show it."""
    if text.startswith("#!"):
        words = [os.path.basename(word) for word in text[2 : (text + "\n").find("\n")].split()]
        for language in _LANGUAGES.values():
            if any(re.fullmatch(language.programs, word) for word in words):
                return language
    name = os.path.basename(path)
    return next((each for each in _LANGUAGES.values() if re.search(each.names, name, re.IGNORECASE)), None)


def _scripts(files: Mapping[str, str]) -> dict[str, str]:
    """Return the programs among files of `/tests`, without comments."""
    return {
        path: re.sub(r"(?m)(?:^|(?<=\s))#.*$", "", text)
        for path, text in files.items()
        if path.endswith(_SCRIPTS) or text.startswith("#!") or _of(path, "") is _MAKE
    }


def _new_paths(
    task: Task, scripts: Mapping[str, str], tree: Mapping[str, bytes], names: ImportNames, allowed: Globs
) -> list[str]:
    """Return paths that are not there and may be made: one for each glob, and those that a script names."""
    found = dict.fromkeys(
        "/".join(part.replace("*", "canary").replace("?", "c") for part in glob.split("/") if part != "**")
        for glob in task.allowed
    )
    found |= dict.fromkeys(glob.replace("**", "canary").replace("*", "canary") for glob in task.allowed)
    said = "\n".join([*scripts.values(), *(f"{name}={value}" for name, value in task.variables.items())])
    words = dict.fromkeys(re.findall(r"[\w.+/~-]*\w", said))
    found |= dict.fromkeys(_APP.sub("", word) for word in words)
    modules = [word for names in _IMPORT.findall(said) for word in re.findall(r"[\w.]+", names)]
    files = dict.fromkeys(f"{module.partition('.')[0]}.py" for module in (*modules, "sitecustomize"))
    found |= files  # Python looks into the current folder first
    words |= files
    for value in re.findall(r"PATH=[\"']?([^\s\"';]+)", said):  # a program of another one's name
        for folder in value.split(":"):
            above = _APP.sub("", f"{folder}/").rstrip("/")
            found |= dict.fromkeys(os.path.normpath(f"{above}/{word}") for word in words if "/" not in word)
    folders = _above(tree)
    new: list[str] = []
    for path in dict.fromkeys(map(os.path.normpath, filter(None, found))):
        is_path = not path.startswith(("/", "..")) and path != "." and "~" not in path
        is_taken = path in tree or path in folders or not _above([path]).isdisjoint(tree)
        is_beside = path not in _above(new) and _above([path]).isdisjoint(new)
        if is_path and not is_taken and is_beside and allowed.match(path) and not why_never(path, names):
            new.append(path)
        if len(new) == _MOST_NEW:
            break
    return new


def _above(paths: Iterable[str]) -> set[str]:
    return {path[:end] for path in paths for end, sign in enumerate(path) if sign == "/"}
