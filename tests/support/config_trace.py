"""Notes which settings of verl a run reads, and which file reads each: in every process of the run.

A run has it with the variables of `config_reads.traced`: verl imports this module in each process. Each process writes
lines `SETTING<tab>FILE` into a file of its own. The setting of an OmegaConf section is its path; that of a dataclass,
which knows no path, is `~CLASS.FIELD`. The file is that of the nearest frame outside of OmegaConf and of verl's base
class. A read by another package than verl and ours (a copy, a conversion, a print) is none.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.base_config import BaseConfig

from tests.support.config_reads import FOLDER

_VERL = f"{Path(sys.modules['verl'].__path__[0])}{os.sep}"
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}verl_multiturn{os.sep}"
_PASSED = (f"{Path(sys.modules['omegaconf'].__path__[0])}{os.sep}", f"{_VERL}base_config.py", __file__)


class _Notes:
    """The reads of this process; a fork begins a file of its own."""

    def __init__(self) -> None:
        self._process = 0
        self._seen: set[tuple[str, str]] = set()

    def add(self, setting: str) -> None:
        """Note that the code which called OmegaConf or verl's base class reads a setting."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(_PASSED):
            if frame.f_back is None:
                return
            frame = frame.f_back
        name = frame.f_code.co_filename
        if name.startswith(_VERL):
            reader = name.removeprefix(_VERL)
        elif name.startswith(_OURS):
            reader = f"verl_multiturn/{name.removeprefix(_OURS)}"
        else:
            return
        if (note := (setting, reader)) in self._seen and self._process == os.getpid():
            return
        self._process = os.getpid()
        self._seen.add(note)
        with Path(os.environ[FOLDER], f"{self._process}.tsv").open("a", encoding="utf-8") as file:
            file.write(f"{setting}\t{reader}\n")


_notes = _Notes()


def _trace_sections() -> None:
    get = DictConfig._get_impl

    @functools.wraps(get)
    def get_noted(self: DictConfig, key: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, str):
            _notes.add(self._get_full_key(key))
        return get(self, key, *args, **kwargs)

    DictConfig._get_impl = get_noted
    select = OmegaConf.select

    @functools.wraps(select)
    def select_noted(cfg: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        _notes.add(cfg._get_full_key(key) if key else key)
        return select(cfg, key, *args, **kwargs)

    OmegaConf.select = staticmethod(select_noted)


def _trace_dataclasses() -> None:
    get: Callable[[Any, str], Any] = BaseConfig.__getattribute__

    def get_noted(self: Any, name: str) -> Any:
        value = get(self, name)
        if name in type(self).__dataclass_fields__:
            _notes.add(f"~{type(self).__name__}.{name}")
        return value

    BaseConfig.__getattribute__ = get_noted


if os.environ.get(FOLDER):
    _trace_sections()
    _trace_dataclasses()
