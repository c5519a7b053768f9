"""Where a model lies: a run's folder, a checkpoint of verl's FSDP trainers, or a Hugging Face folder.

Nothing is loaded here. That a checkpoint has all its files is known before anything expensive begins. A folder may be
somebody else's: its configuration is data, and a path in it is followed in a run of the user's own alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.models.checkpoints import POSITION, checkpoint_folder, is_complete
from verl_multiturn.models.hash import INDEX, WEIGHTS, weight_files
from verl_multiturn.paths import read_regular
from verl_multiturn.rows.files import refuse_pointer
from verl_multiturn.trust.files import require_plain_model
from verl_multiturn.trust.rule import is_own
from verl_multiturn.trust.settings import HYDRA, read_settings

_STEP = re.compile(r"global_step_(\d+)")
_RANK = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_CONFIG = "config.json"
_KINDS = (
    "expected a run's folder (outputs/NAME), a checkpoint of verl's FSDP trainers (…/global_step_N/actor) or a Hugging "
    "Face folder"
)


@dataclass(frozen=True)
class Model:
    """A model on the disk.

    Attributes:
        folder: Folder of the weights: those of a checkpoint's ranks, or safetensors.
        ranks: Number of FSDP ranks; 0: a Hugging Face folder.
        described: Folder with `config.json` and the tokenizer.
        run: Folder of the run that trained it; None: not known.
        step: Training step of the checkpoint; None: not known.
        passed_over: A sentence about newer checkpoints that are not whole; empty: there are none.
        is_trusted: Whether the user gave `--trust`, so that the run's configuration may name the places of files.
    """

    folder: Path
    ranks: int
    described: Path
    run: Path | None = None
    step: int | None = None
    passed_over: str = ""
    is_trusted: bool = False

    def shards(self) -> list[Path]:
        """Return the files of the ranks, in their order; none for a Hugging Face folder."""
        return [self.folder / f"model_world_size_{self.ranks}_rank_{rank}.pt" for rank in range(self.ranks)]

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The run's composed configuration, as `read_settings` has it; {}: not known."""
        return read_settings(self.run) if self.run is not None else {}

    @cached_property
    def is_own(self) -> bool:
        """Whether the run is one of the user's own, or trusted: its configuration may name the places of files."""
        return self.run is not None and (self.is_trusted or is_own(self.run))

    def setting(self, path: str) -> Any:
        """Return a value of the run's configuration by its path (`data.seed`); None where there is none."""
        value: Any = self.settings
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def named_path(self, path: str | Path) -> Path | None:
        """Return a path that the run's configuration has; None: it leads out of the folder of somebody else's run.

        Args:
            path: The path.
        """
        if self.is_own:
            return Path(path)
        try:
            is_within = self.run is not None and Path(path).resolve().is_relative_to(self.run.resolve())
        except (OSError, RuntimeError, ValueError):  # a link to itself, or a name that is none
            return None
        return Path(path) if is_within else None


def find_model(path: Path, step: int | None = None, is_trusted: bool = False) -> Model:
    """Return where a model lies, and of which kind it is.

    Args:
        path: The folder of a run, a checkpoint or a Hugging Face model.
        step: Step of the checkpoint, for a run's folder; None: the newest whole one.
        is_trusted: Whether the user gave `--trust`: files that the run's configuration names are used.

    Raises:
        ConfigError: There is no model, a checkpoint lacks a file, or `step` is given and is not that of the model; or
            its files lead out of its folder (see `require_plain_model`).
    """
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is no folder; {_KINDS}")
    refuse_pointer(path)
    model = replace(_find(path, step, is_trusted), is_trusted=is_trusted)
    if model.run is None and model.ranks and _is_run(path):  # its checkpoints lie elsewhere
        model = replace(model, run=path)
    root = path if model.run is None else model.run
    if not model.folder.resolve().is_relative_to(root.resolve()):
        if not model.is_own:
            raise ConfigError(
                f"the checkpoints of {str(path)!r} are a link that leads out of the folder, to "
                f"{str(model.folder.resolve())!r}; name that folder itself"
            )
        root = model.folder
    require_plain_model(model.described, model.folder, root)
    return model


def _find(path: Path, step: int | None, is_trusted: bool) -> Model:
    for folder in (path, path / "actor"):
        if _is_checkpoint(folder):
            model = _checkpoint(folder)
            if step not in (None, model.step):
                raise ConfigError(f"--step {step}: {str(path)!r} is one checkpoint; leave --step out, or name the run")
            return model
    for folder in (path, path / "checkpoints", _place_of_checkpoints(path, is_trusted)):
        if any(_STEP.fullmatch(each.name) for each in folder.glob("global_step_*")):
            return _of_run(folder, step)
    if (path / _CONFIG).is_file() and (not _is_run(path)):
        if step is not None:
            raise ConfigError(f"--step {step}: {str(path)!r} is a Hugging Face folder; leave --step out")
        weight_files(path)
        return Model(path, 0, path)
    if (path / "adapter_config.json").is_file():
        raise ConfigError(f"{str(path)!r} is an adapter without its base; {_KINDS}")
    if _is_run(path):
        raise ConfigError(
            f"{str(path)!r} is a run without a checkpoint; start it again with trainer.save_freq=N, or name another run"
        )
    raise ConfigError(f"{str(path)!r} has neither a checkpoint nor {WEIGHTS} or {INDEX}; {_KINDS}")


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that a folder is, or in whose checkpoints it lies; None: it is of no run.

    Args:
        path: Folder of a run, of checkpoints, of a checkpoint, or a Hugging Face folder.
    """
    if _is_run(path):
        return path
    is_part = path.name in ("actor", "checkpoints") or _STEP.fullmatch(path.name) is not None
    return next((each for each in path.absolute().parents[:4] if _is_run(each)), None) if is_part else None


def _is_run(path: Path) -> bool:
    return (path / ".run.json").is_file() or (path / HYDRA).is_file()


def _is_checkpoint(folder: Path) -> bool:
    if (folder / "model" / "dist_ckpt").is_dir() or (folder / "dist_ckpt").is_dir():
        raise ConfigError(
            f"{str(folder)!r} is a checkpoint of Megatron, which only verl itself can put together; run python -m "
            "verl.model_merger merge --backend megatron"
        )
    return (folder / "fsdp_config.json").is_file() or any(_RANK.fullmatch(each.name) for each in folder.glob("model_*"))


def _of_run(checkpoints: Path, step: int | None) -> Model:
    """Return the checkpoint of a step, or the newest whole one, of a folder of checkpoints."""
    names = [found for each in checkpoints.iterdir() if (found := _STEP.fullmatch(each.name))]
    steps = sorted(int(found[1]) for found in names)
    whole = [each for each in steps if _is_whole(checkpoint_folder(checkpoints, each))]
    if step is not None and step not in steps:
        raise ConfigError(
            f"--step {step}: {str(checkpoints)!r} has no such checkpoint; there are {', '.join(map(str, steps))}"
        )
    chosen = step if step is not None else max(whole, default=steps[-1])
    folder = checkpoint_folder(checkpoints, chosen)
    if chosen not in whole:
        others = f"give --step {whole[-1]}, which is whole" if whole else "no other one is whole"
        raise ConfigError(
            f"{str(folder)!r} is half a checkpoint: it lacks the weights or {POSITION}, which the trainer writes last; "
            f"{others}"
        )
    newer = [str(each) for each in steps if each > chosen and each not in whole] if step is None else []
    passed_over = f"not whole, and passed over: global_step_{', global_step_'.join(newer)}" if newer else ""
    return _checkpoint(_weights_of(folder), passed_over)


def _weights_of(folder: Path) -> Path:
    return folder / "actor" if (folder / "actor").is_dir() else folder


def _is_whole(folder: Path) -> bool:
    """Return whether a step's checkpoint is complete. verl's SFT trainer has no folder `actor`, and a file per rank."""
    return is_complete(folder) or (not (folder / "actor").is_dir() and any(folder.glob("data_*.pt")))


def _checkpoint(folder: Path, passed_over: str = "") -> Model:
    """Return the checkpoint of a folder, whose files are all there.

    Raises:
        ConfigError: One is missing.
    """
    there = {(int(found[1]), int(found[2])) for each in folder.iterdir() if (found := _RANK.fullmatch(each.name))}
    ranks = _world_size(folder) or max((size for size, _ in there), default=0)
    missing = [rank for rank in range(ranks) if (ranks, rank) not in there]
    if missing or not ranks:
        raise ConfigError(
            f"{str(folder)!r} lacks rank {', '.join(map(str, missing)) or 0} of {ranks or 'an unknown number'} (a file "
            f"model_world_size_{ranks or 'N'}_rank_{missing[0] if missing else 0}.pt); copy it from the node that "
            "wrote it, or name another checkpoint"
        )
    described = folder / "huggingface"
    if not (described / _CONFIG).is_file():
        raise ConfigError(f"{str(folder)!r} is half a checkpoint: it lacks huggingface/{_CONFIG}; name another one")
    place = next((each for each in (folder, folder.parent) if _STEP.fullmatch(each.name)), None)
    found = _STEP.fullmatch(place.name) if place else None
    run = next((each for each in folder.absolute().parents[:4] if _is_run(each)), None)
    return Model(folder, ranks, described, run, int(found[1]) if found else None, passed_over)


def _world_size(folder: Path) -> int:
    """Return the number of ranks from a checkpoint's own note; 0: it has none."""
    try:
        return int(json.loads(read_regular(folder / "fsdp_config.json", within=folder))["world_size"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return 0


def _place_of_checkpoints(run: Path, is_trusted: bool) -> Path:
    """Return the folder of checkpoints that the configuration of the user's own run names, else the run's folder."""
    if not _is_run(run) or not (is_trusted or is_own(run)):
        return run
    trainer = read_settings(run).get("trainer")
    place = trainer.get("default_local_dir") if isinstance(trainer, Mapping) else None
    return Path(place) if isinstance(place, str) else run
