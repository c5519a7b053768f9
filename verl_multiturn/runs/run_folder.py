"""`RunFolder`: the output folder of a run, which belongs to one run at a time and loses nothing.

Files that the launcher itself writes there:

    .lock             locked while a run uses the folder
    .run.json         recipe that uses the folder, and whether it is the smoke run
    data/.lock        locked while a node makes rows
    data/.prepared    how the rows in `data/` were made, and their files; other rows are the user's
    data/.preparing   the same, while the rows are being made: rows beside it may be half-written
    earlier/N/        results of earlier runs that began in this folder and were not resumed
    earlier/N/.moving there as long as they are being moved
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.points import FOLDER as EVALUATIONS
from verl_multiturn.models.checkpoints import checkpoints_of, mend_tracker, resumes
from verl_multiturn.observe.metric_files import metric_files
from verl_multiturn.runs.progress import say

OwnFiles = Literal["later", "maybe", "there"]
"""Whether a run has made the files in its own folder, such as its rows.

- `later`: it will make them, and may replace those that are there: none is looked at.
- `maybe`: those that are there are looked at.
- `there`: it has, and one that is missing is refused.
"""

_MOVING = ".moving"
_SPLITS = ("train", "test")
# Results of a run, beside its files of metrics. verl would resume from checkpoints that stay, beside the metrics of
# another run. Checkpoints elsewhere (`trainer.default_local_dir`) are not ours to move.
_CHECKPOINTS = "checkpoints"
_RESULTS = (
    "train.log", "records", "validation", "start_up.json", "summary.json", "curve.png",
    "trajectories.jsonl", EVALUATIONS,
)  # fmt: skip


def require_folder(path: Path, where: str) -> None:
    """Refuse a path that is not a folder and cannot become one, since a file lies in its place or above it.

    Args:
        path: The path; it need not exist.
        where: The option or setting that names it, with its value, for errors.

    Raises:
        ConfigError: A file lies there.
    """
    there = next(each for each in (path, *path.parents) if os.path.lexists(each) or each == each.parent)
    if not there.is_dir():
        at = "" if there == path else f": {str(there)!r}"
        raise ConfigError(f"{where}{at} is no folder; name a new one, or the folder of an earlier run")


class RunFolder:
    """The output folder of one run.

    Args:
        path: The folder. It need not exist.
        node: Number of this node in a run that is started once on each of several nodes; 0 for the first or only one.
    """

    def __init__(self, path: Path, node: int = 0) -> None:
        self.path = path
        self._node = node
        suffix = f".{node}" if node else ""
        self.log = path / f"train{suffix}.log"
        """File with the output of the trainer."""
        self._lock = path / f".lock{suffix}"
        self._data = path / "data"

    @contextmanager
    def held(self) -> Iterator[int]:
        """Make the folder, and keep every other run out of it while the context lasts.

        Yields:
            A descriptor. While a process holds it, the folder stays kept.

        Raises:
            ConfigError: Another run uses the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                holder = os.read(descriptor, 200).decode(errors="replace").strip() or "a process that left no name"
                open_in = ", ".join(_holders(self._lock)) or "none that can be seen here"
                raise ConfigError(
                    f"another run uses {str(self.path)!r} ({holder}, or a process that it started; processes with its "
                    f".lock open: {open_in}); wait for its end, end it, or name another folder with --out"
                )
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def rows_held(self) -> Iterator[None]:
        """Wait until no other node makes rows in this folder, and let none begin while the context lasts."""
        self._data.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._data / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _locked(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def has_rows(self, made: Mapping[str, Any]) -> bool:
        """Return whether the folder has the rows that a run needs.

        These are rows that were made in the same way, and rows that the user put there. Rows that were made from a
        source of the user's (`--data`) stay for runs that name none.

        Args:
            made: The way in which the run would make its rows.

        Raises:
            ConfigError: The run would replace rows that were not made by a run.
        """
        always = made["smoke"] or made["source"] is not None
        there, half_made = self._stamp(".prepared"), self._stamp(".preparing")
        stamp = there if half_made is None else half_made
        wanted = list(stamp.get("files") or _SPLITS) if stamp is not None else _SPLITS  # a script may write one split
        if not all((self._data / f"{split}.parquet").is_file() for split in wanted):
            return False
        if stamp is None or ("files" in stamp and stamp["files"] != self._files()):
            if always:
                raise ConfigError(
                    f"{str(self._data)!r} has rows that no run made, and this run would replace them; move them away, "
                    "or name another folder with --out"
                )
            return True
        if half_made is not None or always:
            return False
        if {**stamp["made"], "source": None} != dict(made):
            return False
        origin = stamp["made"].get("source")
        say(f"rows: those of an earlier start{f', made from {origin}' if origin else ''} ({self._data})")
        return True

    def begin_rows(self, made: Mapping[str, Any]) -> None:
        """Note how rows are about to be made. Until `end_rows` is called, rows in the folder count as half-written.

        Args:
            made: The way in which the rows are made, as JSON.
        """
        (self._data / ".preparing").write_text(json.dumps({"made": made}) + "\n", encoding="utf-8")
        (self._data / ".prepared").unlink(missing_ok=True)

    def end_rows(self, made: Mapping[str, Any], complete: bool) -> None:
        """Note that the rows are complete, or note the files of a failed script.

        Rows that differ from these later are the user's.

        Args:
            made: The way in which the rows were made.
            complete: Whether the script succeeded.
        """
        preparing = self._data / ".preparing"
        preparing.write_text(json.dumps({"made": made, "files": self._files()}) + "\n", encoding="utf-8")
        if complete:
            preparing.rename(self._data / ".prepared")

    def _stamp(self, name: str) -> dict[str, Any] | None:
        """Return the content of a stamp; None if there is none, or one that cannot be read."""
        path = self._data / name
        found = _read(path) if path.is_file() else {}
        return found if "made" in found else None

    def _files(self) -> dict[str, list[int]]:
        """Return size in bytes and time of the last change in nanoseconds of each file of rows, by name."""
        there = {name: self._data / f"{name}.parquet" for name in _SPLITS}
        return {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in there.items() if path.is_file()}

    def described_rows(self) -> str:
        """Return the paths of the files of rows, with their numbers of rows, as text."""
        import pyarrow
        import pyarrow.parquet

        parts = []
        for split in _SPLITS:
            path = self._data / f"{split}.parquet"
            with contextlib.suppress(OSError, pyarrow.ArrowException):  # a script of the user's may write other files
                parts.append(f"{path} ({pyarrow.parquet.read_metadata(path).num_rows})")
        return ", ".join(parts) or str(self._data)

    def begin(self, recipe: str, smoke: bool, trainer: Mapping[str, Any], *, resumes: bool = False) -> None:
        """Prepare the folder for a start of a run.

        A start that resumes from a checkpoint keeps everything. Otherwise the results of an earlier run are moved into
        `earlier/N`, where N is the next free number.

        Args:
            recipe: Name of the recipe.
            smoke: Whether it is the recipe's smoke run.
            trainer: The section `trainer` of the configuration.
            resumes: Whether the run resumes from a checkpoint that the configuration names.

        Raises:
            ConfigError: The run would resume from the checkpoint of another recipe.
        """
        if self._node:
            return
        run = {"recipe": recipe, "smoke": smoke}
        noted = self.path / ".run.json"
        if resumes or self._resumes(trainer):
            if noted.is_file() and (there := _read(noted)) != run:
                raise ConfigError(
                    f"{str(self.path)!r} has a checkpoint of {_named(there)}, from which {_named(run)} would resume; "
                    "name another folder with --out, or set trainer.resume_mode=disable"
                )
        else:
            self._move_results()
        noted.write_text(json.dumps(run) + "\n", encoding="utf-8")

    def _resumes(self, trainer: Mapping[str, Any]) -> bool:
        """Return whether the trainer finds a checkpoint of an earlier start by itself; mend a torn tracker file."""
        if trainer.get("resume_mode", "auto") != "auto":
            return False
        checkpoints = checkpoints_of(trainer, self.path)
        if mended := mend_tracker(checkpoints):
            say(mended)
        return resumes(checkpoints)

    def _move_results(self) -> None:
        # Checkpoints first: where the move fails half-way, no later start resumes from them without their metrics.
        found = [self.path / _CHECKPOINTS, *metric_files(self.path), *(self.path / name for name in _RESULTS)]
        found = [path for path in found if path.exists() or path.is_symlink()]
        if not found:
            return
        last = max((int(path.name) for path in (self.path / "earlier").glob("*") if path.name.isdigit()), default=0)
        # The rest of an interrupted move belongs to the same run.
        goes_on = (self.path / "earlier" / str(last) / _MOVING).is_file()
        target = self.path / "earlier" / str(last if goes_on else last + 1)
        target.mkdir(parents=True, exist_ok=True)
        (target / _MOVING).touch()
        for path in found:
            if path.is_symlink():  # a relative link would lead elsewhere
                (target / path.name).symlink_to(os.path.abspath(path.parent / os.readlink(path)))
                path.unlink()
            else:
                shutil.move(path, target / path.name)
        (target / _MOVING).unlink()
        say(f"the results of an earlier run were moved to {target}")

    def next_metrics(self) -> Path:
        """Return the file for the metrics of this start of the run.

        verl's logger empties its file at the start. So a resumed run gets a new file and keeps the files of its earlier
        starts (`observe/metric_files.py` reads them all).
        """
        path, start = self.path / "metrics.jsonl", 1
        while path.is_file() and path.stat().st_size:
            start += 1
            path = self.path / f"metrics.{start}.jsonl"
        return path


def _locked(descriptor: int, how: int) -> bool:
    """Lock a file, and return False if another process holds it. Where there are no locks, no process is kept out."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        say("this file system has no locks: nothing keeps a second run out of this folder")
    return True


def _holders(lock: Path) -> list[str]:
    """Return the processes that have a file open, apart from this one, as `NUMBER NAME`."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error, OSError):
            descriptors = Path(f"/proc/{process.pid}/fd")
            opened = [os.path.realpath(descriptors / number) for number in os.listdir(descriptors)]
            if process.pid != os.getpid() and os.path.realpath(lock) in opened:
                found.append(f"{process.pid} {process.info['name']}")
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one for a file that holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _named(run: Mapping[str, Any]) -> str:
    return f"{run.get('recipe')!r}{' (its smoke run)' if run.get('smoke') else ''}"
