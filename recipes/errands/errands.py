"""The task of this recipe: three requests to move or copy files, where "there" means the folder of the first.

Only this module defines how an errand is made, worded, done and named in a row. The warm start and the rows use it.

    user:   Move "plan.txt" to "music".
    model:  <tool_call>{"name": "mv", "arguments": {"source": "plan.txt", "destination": "music"}}</tool_call>
    tool:   {"result": "'plan.txt' moved to 'music/plan.txt'"}
    model:  Done.
    user:   Copy "song.txt" there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DATA_SOURCE = "errands"
SYSTEM_PROMPT = "Do what the user asks with one call. Then say: Done."
DONE = "Done."
HOME = "home"
"""The folder that every conversation begins in, with the files and folders."""
FOLDERS = ("games", "music", "photos", "school")
FILES = ("list", "map", "menu", "note", "plan", "poem")
"""Names of the files, without `.txt`."""
TOOLS = {"Move": "mv", "Copy": "cp"}
"""Functions of BFCL's file system, by the word that the user has for them."""
REQUESTS = 3
THERE = "there"


@dataclass(frozen=True)
class Errand:
    """Three requests, each of which one call does.

    Attributes:
        folder: The folder of the first request.
        verbs: `Move` or `Copy`, for each request.
        files: The file of each request.
    """

    folder: str
    verbs: tuple[str, ...]
    files: tuple[str, ...]

    def request(self, index: int) -> str:
        """Return the user's text."""
        where = THERE if index else f'to "{self.folder}"'
        return f'{self.verbs[index]} "{self.files[index]}" {where}.'

    def call(self, index: int, folder: str = "") -> tuple[str, dict[str, str]]:
        """Return the name and the arguments of a request's call.

        Args:
            index: The request.
            folder: Where the file goes; "": to the right folder.
        """
        return TOOLS[self.verbs[index]], {"source": self.files[index], "destination": folder or self.folder}

    def dialogue(self) -> str:
        """Return the errand as a dialogue in the form of BFCL's data, with the right calls."""
        calls = [self.call(index) for index in range(REQUESTS)]
        return json.dumps(
            {
                "id": DATA_SOURCE,
                "question": [[{"role": "user", "content": self.request(index)}] for index in range(REQUESTS)],
                "initial_config": {"GorillaFileSystem": {"root": {HOME: _folder(world())}}},
                "involved_classes": ["GorillaFileSystem"],
                "ground_truth": [
                    [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"]
                    for name, arguments in calls
                ],
            }
        )


def world() -> dict[str, Any]:
    """Return the files and folders that every conversation begins with."""
    folders = {name: _folder({}) for name in FOLDERS}
    return folders | {f"{name}.txt": {"type": "file", "content": name} for name in FILES}


def _folder(contents: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "directory", "contents": dict(contents)}


def make_errands(size: int, seed: int) -> list[Errand]:
    """Make errands.

    Args:
        size: Number of errands.
        seed: Seed of the random draws.
    """
    rng = random.Random(seed)
    return [
        Errand(
            rng.choice(FOLDERS),
            tuple(rng.choices(list(TOOLS), k=REQUESTS)),
            tuple(f"{name}.txt" for name in rng.sample(FILES, REQUESTS)),
        )
        for _ in range(size)
    ]
