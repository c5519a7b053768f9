"""Environments of the programs: each is installed once, pinned, below one folder outside of the repository.

An environment is a folder with a stamp of its contents; another stamp, or none, means that it is made anew. Python's
packages are locked with all that they need (`requirements/NAME.txt`), npm's by their version.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path(__file__).parent / "requirements"
_INSTALL_S = 900


def folder() -> Path:
    """Return the folder of all environments: `$HARNESSES`, or one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HARNESSES") or cache / "verl-multiturn" / "harnesses")


@dataclass(frozen=True)
class Environment:
    """Where a program is installed.

    Args:
        name: Name of the environment, and of the lock file of a Python environment.
        npm: Packages and versions, such as "opencode-ai@1.18.33", with a blank between two; None for a Python
            environment.
    """

    name: str
    npm: str | None = None

    @property
    def path(self) -> Path:
        """Folder of the environment."""
        return folder() / self.name

    @property
    def programs(self) -> Path:
        """Folder of the programs in it."""
        return self.path / ("node_modules/.bin" if self.npm else "bin")

    @property
    def stamp(self) -> str:
        """Return the parts of the environment."""
        return self.npm or hashlib.sha256((LOCKS / f"{self.name}.txt").read_bytes()).hexdigest()

    def make(self) -> None:
        """Install the environment unless it is there.

        Raises:
            RuntimeError: The installation failed; the message has the end of the output.
        """
        stamp = self.path / ".stamp"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == self.stamp:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        for command in self._npm() if self.npm else self._pip():
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_INSTALL_S, encoding="utf-8", errors="replace"
            )
            if done.returncode:
                raise RuntimeError(f"{self.name}: {' '.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")
        stamp.write_text(self.stamp, encoding="utf-8")

    def _npm(self) -> list[list[str]]:
        return [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(self.path), *str(self.npm).split()]]

    def _pip(self) -> list[list[str]]:
        pip = [str(self.path / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # In an activated environment, that is the Python that made it.
        return [[sys._base_executable, "-m", "venv", str(self.path)], [*pip, "-r", str(LOCKS / f"{self.name}.txt")]]
