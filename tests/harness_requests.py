"""Requests of real agent programs, in `tests/data/harness_requests`, a file for each program and task.

Every text of a program is a filler of a few letters: equal texts have equal fillers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "harness_requests"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.json"))


def recorded(program: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the requests of a program in order: the path without its query, and the body."""
    requests = json.loads((FOLDER / f"{program}.json").read_text())
    return [(each["path"].partition("?")[0], each["body"]) for each in requests]
