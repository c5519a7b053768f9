"""A case of `benchmarks.strangers_folder`: an honest folder with one change, and the means to make changes."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.long.strangers.strangers_material import World, read_json, write_json
from tests.support.sample_records import START

Change = Callable[[Path, World], None]
SPARSE = 6 << 30
"""Bytes that a file claims to have, and that take no room on the disk."""
DIGITS = "9" * 100_000
DEEP = "[" * 200_000


@dataclass(frozen=True)
class Case:
    """An honest folder with one change.

    Attributes:
        name: Its name in the results.
        material: Which honest folder it is a copy of.
        change: Makes the change.
        planted: Whether a link is planted under the name of the index's unfinished file.
        counted: Whether the figures are those of the honest folder; False: they may differ, if two commands agree.
        folder: Name of the copy; a name may be hostile, too.
        inside: Whether the command is begun in the folder, in a process that has imported nothing yet.
        is_short: Whether the short form tries it.
    """

    name: str
    material: str
    change: Change
    planted: bool = False
    counted: bool = True
    folder: str = "run"
    inside: bool = False
    is_short: bool = False


def packed(folder: Path) -> Path:
    """Return the packed file of a run's records."""
    return next((folder / "records").glob("*.jsonl.gz"))


def lines_of(folder: Path) -> Path:
    """Return the file of lines beside them."""
    return next((folder / "records").glob("*.lines.jsonl"))


def changed_lines(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the lines of a run's workers; None leaves a line out."""
    path = lines_of(folder)
    made = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in made if line is not None))


def records_in(path: Path) -> list[dict[str, Any]]:
    """Return the records of a packed file."""
    return [json.loads(line) for line in gzip.open(path).read().splitlines()]


def one_more(folder: Path, **entries: Any) -> None:
    """Add a file with one record, which is the first one of the run with other entries; values may be raw JSON."""
    record = {**records_in(packed(folder))[0], "request_id": "guest", "uid": "guest", **entries}
    text = json.dumps(record)
    for value in entries.values():
        if isinstance(value, Raw):
            text = text.replace(json.dumps(str(value)), value)
    with gzip.GzipFile(folder / "records" / f"{START}-guest.jsonl.gz", "wb", mtime=0) as file:
        file.write(text.encode() + b"\n")


class Raw(str):
    """A value as it is in JSON."""


def set_config(folder: Path, **values: Any) -> None:
    """Set values of a run's configuration by their path, with `__` for the dots: in Hydra's file and the run's own."""
    hydra = folder / "hydra" / ".hydra" / "config.yaml"
    config = read_json(hydra)
    run = folder / "records" / f"run-{START}.json"
    told = read_json(run)
    for name, value in values.items():
        for place in (config, told["settings"]):
            *path, last = name.split("__")
            for key in path:
                place = place.setdefault(key, {})
            place[last] = value
    write_json(hydra, config)
    write_json(run, told)


def guest_code(folder: Path, world: World, name: str = "evil.py") -> Path:
    """Write a module into a folder that leaves a canary when it runs."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    canary = world.canary / f"code of {path.name}"
    path.write_text(
        f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
        "def compute_score(*given, **named):\n    return 1.0\n"
        "class EvilConfig:\n    pass\nclass EvilModel:\n    pass\nclass EvilTokenizer:\n    pass\n"
        "class RLHFDataset:\n    pass\nTOOLS = []\n"
    )
    return path


def touching(world: World, name: str) -> str:
    """Return a shell command that leaves a canary."""
    return f"touch '{world.canary / name}'"


def pipe(path: Path) -> None:
    """Put a pipe into the place of a file."""
    _away(path)
    os.mkfifo(path)


def sock(path: Path) -> None:
    """Put a socket into the place of a file."""
    _away(path)
    made = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        made.bind(path.name)
    finally:
        os.chdir(here)
        made.close()


def link(path: Path, target: Path | str) -> None:
    """Put a link into the place of a file or a folder."""
    _away(path)
    path.symlink_to(target)


def sparse(path: Path) -> None:
    """Put a file of gigabytes that take no room into the place of a file."""
    _away(path)
    with path.open("wb") as file:
        file.truncate(SPARSE)


def directory(path: Path) -> None:
    """Put a folder into the place of a file."""
    _away(path)
    path.mkdir()


def endless(path: Path) -> None:
    """Put a link to a device without an end into the place of a file."""
    link(path, "/dev/zero")


def deep(path: Path) -> None:
    """Put JSON of a great depth into the place of a file."""
    _away(path)
    path.write_text(DEEP + "\n")


def digits(path: Path) -> None:
    """Put a number of 100,000 digits into the place of a file."""
    _away(path)
    path.write_text(f'{{"world_size": {DIGITS}, "schema": {DIGITS}, "step": {DIGITS}, "event": "step"}}\n')


def _away(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": pipe, "a socket": sock, "a folder": directory, "a file of 6 GB": sparse, "a device": endless,
    "JSON of a great depth": deep, "a number of 100,000 digits": digits,
}  # fmt: skip


def in_places(material: str, places: dict[str, Callable[[Path], Path]], kinds: dict[str, str]) -> Iterator[Case]:
    """Yield a case for each place and each of its kinds.

    Args:
        material: The honest folder.
        places: Where, by name.
        kinds: Letters of the kinds that go there, by the place's name: p(ipe), s(ocket), f(older), 6 (GB), d(evice),
            j(SON), n(umber), l(ink to the secret).
    """
    letters = dict(zip("psf6djn", KINDS.items(), strict=True))
    for name, place in places.items():
        for letter in kinds[name]:
            kind, put = letters.get(letter, ("a link to the secret", None))

            def change(folder: Path, world: World, put: Any = put, place: Any = place) -> None:
                path = place(folder)
                if put is None:
                    link(path, world.secret)
                else:
                    put(path)

            yield Case(f"{kind} for {name}", material, change, counted=False, is_short=letter == "p" and name in SHORT)


SHORT = ("the records", "the lines", "Hydra's configuration", "the tokenizer")
"""Places that the short form tries a pipe in."""
