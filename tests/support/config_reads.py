"""The reads of verl's settings that the processes of a run note (`config_trace.py`): requested, and read back."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "CONFIG_TRACE"
"""Environment variable of the folder of the notes."""


def traced(folder: Path) -> dict[str, str]:
    """Return the environment variables with which the processes of a run note their reads in a folder."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "tests.support.config_trace", FOLDER: str(folder)}


def reads_in(folder: Path) -> list[tuple[str, str]]:
    """Return the reads that a traced run noted in a folder: setting and reading file."""
    lines = {line for file in folder.glob("*.tsv") for line in file.read_text(encoding="utf-8").splitlines()}
    return [(setting, file) for setting, _, file in (line.partition("\t") for line in sorted(lines))]
