"""Hydra's configuration files, each read once in a process of tests: four tenths of the CPU time to compose a run."""

from __future__ import annotations

import functools
import os
import pickle
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource


@functools.cache
def read_once() -> None:
    """Let Hydra keep what it read of a file, until the file changes; the packages of tests that compose call it."""
    read, kept = FileConfigSource.load_config, {}

    def load_config(self: Any, config_path: str) -> Any:
        path = os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path)))
        if not os.path.isfile(path):
            return read(self, config_path)
        found = os.stat(path)
        key = (path, self.path, self.provider, found.st_mtime_ns, found.st_size, found.st_ino)
        if key not in kept:
            kept[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(kept[key])  # what is composed changes it

    FileConfigSource.load_config = load_config
