"""Made tasks for a shell, in Harbor's form: six kinds, whose files, words and numbers are drawn by seed.

None needs an image: the Dockerfile is `FROM scratch`, and a shell with coreutils is enough. The tests read files only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_multiturn.harnesses.harbor.tasks.write import HarborTask, write_folder

_WORDS = [
    *("anchor", "bridge", "copper", "desert", "engine", "forest", "garden", "hammer", "island", "jacket"),
    *("kettle", "ladder", "marble", "needle", "orange", "pillow", "quarry", "rocket", "saddle", "timber"),
]


@dataclass(frozen=True)
class Made:
    """One drawn task.

    Attributes:
        ask: The task's prompt.
        files: Files of `/app` by their path.
        command: The command that solves it; it starts in `/app`.
        expected: Text of each file that has to be there in the end, null for one that must not be.
    """

    ask: str
    files: Mapping[str, str]
    command: str
    expected: Mapping[str, str | None]


def count(draw: random.Random) -> Made:
    """Count the lines of a file that hold a word."""
    name, word = draw.sample(_WORDS, 2)
    lines = [" ".join(draw.choices([*_WORDS[:8], word, word], k=3)) for _ in range(draw.randint(12, 30))]
    right = sum(word in line.split() for line in lines)
    return Made(
        f"Count the lines of /app/{name}.txt that hold the word {word}. Write the number into /app/answer.txt.",
        {f"{name}.txt": "\n".join(lines) + "\n"},
        f"grep -cw {word} {name}.txt > answer.txt",
        {"answer.txt": f"{right}\n"},
    )


def rename(draw: random.Random) -> Made:
    """Give all files of a folder another ending."""
    folder, *names = draw.sample(_WORDS, 5)
    old, new = draw.sample(["txt", "md", "log", "dat", "old"], 2)
    files = {f"{folder}/{name}.{old}": f"{draw.randrange(1000)}\n" for name in names}
    moved: dict[str, str | None] = {
        f"{path.removesuffix(old)}{new}": text for path, text in files.items()
    } | dict.fromkeys(files)
    return Made(
        f"Rename the files of /app/{folder}: the ending .{old} becomes .{new}.",
        files,
        f"cd {folder}; for f in *.{old}; do mv $f ${{f%{old}}}{new}; done",
        moved,
    )


def add(draw: random.Random) -> Made:
    """Add up a column of a table."""
    name = draw.choice(_WORDS)
    columns = draw.sample(["price", "weight", "stock", "age"], 3)
    rows = [[str(draw.randrange(1, 100)) for _ in columns] for _ in range(draw.randint(6, 15))]
    number = draw.randrange(3)
    table = "\n".join(",".join(row) for row in [columns, *rows]) + "\n"
    return Made(
        f"Add up the column {columns[number]} of /app/{name}.csv. Write the sum into /app/answer.txt.",
        {f"{name}.csv": table},
        f"awk -F, 'NR>1{{s+=${number + 1}}}END{{print s}}' {name}.csv > answer.txt",
        {"answer.txt": f"{sum(int(row[number]) for row in rows)}\n"},
    )


def cron(draw: random.Random) -> Made:
    """Mend the hour of one line of a crontab."""
    names = draw.sample(_WORDS, 3)
    hours = draw.sample(range(24), 4)
    lines = [f"0 {hour} * * * /bin/{name}" for hour, name in zip(hours, names, strict=False)]
    which = draw.randrange(3)
    right = [*lines]
    right[which] = f"0 {hours[3]} * * * /bin/{names[which]}"
    return Made(
        f"In /app/crontab, let {names[which]} start at hour {hours[3]}. Leave the other lines as they are.",
        {"crontab": "\n".join(lines) + "\n"},
        f"sed -i '/{names[which]}$/s/^0 [0-9]*/0 {hours[3]}/' crontab",
        {"crontab": "\n".join(right) + "\n"},
    )


def sort(draw: random.Random) -> Made:
    """Sort the lines of a file, each once."""
    name = draw.choice(_WORDS)
    lines = draw.choices(_WORDS, k=draw.randint(10, 20))
    return Made(
        f"Sort the lines of /app/{name}.txt, each of them once. Write them into /app/sorted.txt.",
        {f"{name}.txt": "\n".join(lines) + "\n"},
        f"LC_ALL=C sort -u {name}.txt > sorted.txt",
        {"sorted.txt": "\n".join(sorted(set(lines))) + "\n"},
    )


def setting(draw: random.Random) -> Made:
    """Set one value of a file of settings."""
    names = draw.sample(_WORDS, 4)
    values = {name: draw.randrange(100) for name in names}
    name, value = draw.choice(names), draw.randrange(100, 200)
    return Made(
        f"In /app/settings.json, set {name} to {value}. Leave everything else as it is.",
        {"settings.json": json.dumps(values, indent=2) + "\n"},
        f'sed -i \'s/"{name}": [0-9]*/"{name}": {value}/\' settings.json',
        {"settings.json": json.dumps({**values, name: value}, indent=2) + "\n"},
    )


KINDS: tuple[Callable[[random.Random], Made], ...] = (count, rename, add, cron, sort, setting)
"""The kinds of tasks, in the order in which they take turns."""


def draw_tasks(number: int, seed: int) -> list[Made]:
    """Draw so many different tasks, the kinds in turn."""
    draw = random.Random(seed)
    found: dict[str, Made] = {}
    while len(found) < number:
        made = KINDS[len(found) % len(KINDS)](draw)
        found.setdefault(f"{made.ask} {sorted(made.files.items())}", made)
    return list(found.values())


def write_tasks(folder: Path, tasks: Sequence[Made]) -> list[Path]:
    """Write tasks in Harbor's form, and return their folders.

    Args:
        folder: The folder for them.
        tasks: The tasks.
    """
    paths = [folder / f"task-{number:05d}" for number in range(len(tasks))]
    for path, made in zip(paths, tasks, strict=True):
        write_folder(path, _written(made))
    return paths


def _written(made: Made) -> HarborTask:
    copies = sorted({path.partition("/")[0] for path in made.files})
    dockerfile = "\n".join(["FROM scratch", "WORKDIR /app", *(f"COPY {name} /app/{name}" for name in copies)])
    checks = [
        f"[ ! -e /app/{path} ] || right=0" if text is None else f"cmp -s /tests/expected/{path} /app/{path} || right=0"
        for path, text in made.expected.items()
    ]
    script = ["#!/bin/bash", "right=1", *checks, "echo $right > /logs/verifier/reward.txt"]
    expected = {f"expected/{path}": text for path, text in made.expected.items() if text is not None}
    return HarborTask(
        instruction=made.ask,
        environment={"Dockerfile": dockerfile + "\n", **made.files},
        tests={"test.sh": "\n".join(script) + "\n", **expected},
        solution=f"#!/bin/bash\nset -e\ncd /app\n{made.command}\n",
        artifacts=sorted({f"/app/{path.partition('/')[0]}" for path in made.expected}),
    )
