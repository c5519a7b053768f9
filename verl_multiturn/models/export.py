"""`verl-multiturn export`: a trained model as a Hugging Face folder, that is the model which was trained.

Invariants:
- a folder appears under its final name only when it is whole and was checked: it is loaded again, and its logits are
  those of the checkpoint, computed in another way (`logits.py`). Until then it is `.NAME.half`, beside it;
- weights keep the trainer's data type, unless another one is requested;
- an adapter of LoRA is merged in float32;
- nothing of the model's or the run's folder is imported, started or fetched, unless the user gives leave (`UserFiles`).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.models.card import write_card
from verl_multiturn.models.export_result import ExportReport
from verl_multiturn.models.hash import model_hash, tensor_sizes
from verl_multiturn.models.location import Model, find_model
from verl_multiturn.models.logits import (
    bounded_models,
    empty_model,
    load_folder,
    logits_of_folder,
    logits_of_tensors,
    logits_with_adapter,
    read_config,
)
from verl_multiturn.models.lora import Lora, has_adapter, has_base, merge_lora, split_lora
from verl_multiturn.models.shards import read_shards
from verl_multiturn.trust.files import WEIGHTS, remove_code, require_plain_folder
from verl_multiturn.trust.rule import NOTHING_GIVEN, UserFiles

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16")
_LARGEST_FILE = "5GB"
_ROOM = 64 << 20
"""Bytes that a folder needs beside its weights."""
_TOLERANCE, _SHARE = 1e-4, 1e-5


class ExportError(MultiTurnError):
    """An export was begun and could not be finished; nothing exists under its name."""


@dataclass(frozen=True)
class _Weights:
    """Weights of a model.

    Attributes:
        plain: As they are; of LoRA: the base's.
        lora: The adapter.
        merged: Those of the model that was trained; of LoRA: changed ones are float32.
    """

    plain: dict[str, Tensor]
    lora: Lora | None
    merged: dict[str, Tensor]


def export(
    model: Model, to: Path, dtype: str | None, tell: Callable[[str], None], given: UserFiles = NOTHING_GIVEN
) -> ExportReport:
    """Write a model as a Hugging Face folder, check it, and return the report.

    Args:
        model: The model.
        to: The folder. It must not exist, or be empty.
        dtype: Data type of its weights, one of `DTYPES`; None: the trainer's.
        tell: Gets a line about each part of the work.
        given: The user's values in the place of those that the folder names.

    Raises:
        ConfigError: The folder cannot be written, the disk has no room, or the model cannot be exported.
        ExportError: It was begun, and failed: the disk is full, or its logits are not the checkpoint's.
    """
    with _half(to) as half:
        try:
            return _export(model, to, half, dtype, tell, given)
        except OSError as error:
            raise ExportError(f"cannot write {str(to)!r} ({error}); nothing is left there") from None


def _export(
    model: Model, to: Path, half: Path, dtype: str | None, tell: Callable[[str], None], given: UserFiles
) -> ExportReport:
    trusts_code = given.model_code
    config = read_config(model.described, trusts_code)
    weights = _read(model, given, tell)
    with bounded_models(*_sizes(weights.merged)):
        return _written(model, to, half, dtype, tell, given, config, weights)


def _sizes(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    return len(tensors), sum(tensor.numel() for tensor in tensors.values())


def _written(
    model: Model,
    to: Path,
    half: Path,
    dtype: str | None,
    tell: Callable[[str], None],
    given: UserFiles,
    config: Any,
    weights: _Weights,
) -> ExportReport:
    trusts_code = given.model_code
    target = _in_dtype(_untied(weights.merged, config, trusts_code), weights.plain, dtype)
    size = sum(tensor.numel() * tensor.element_size() for tensor in target.values())
    if (free := shutil.disk_usage(half).free) < size + _ROOM:
        raise ConfigError(f"{str(to)!r} needs {(size + _ROOM) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there; "
                          "name a folder on another disk")  # fmt: skip
    tell(f"writing {len(target)} tensors, {size / 1e6:.1f} MB")
    _write(model, half, config, target, trusts_code)
    if not trusts_code and (named := remove_code(half)):
        tell(f"left out, as code of the model: {', '.join(named)}; --trust-remote-code keeps it")
    tell("checking: the folder is loaded, and its logits are compared with the checkpoint's")
    written = logits_of_folder(half, trusts_code)
    difference, allowed, rounding = _check(config, weights, target, written, trusts_code)
    base, from_base = _compare_with_base(model, written, given, tell)
    hashed = model_hash(half)
    exported = ExportReport(
        folder=to,
        model=hashed,
        dtype=" and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in target.values()})),
        tensors=len(target),
        parameters=sum(tensor.numel() for tensor in target.values()),
        size=size,
        lora=weights.lora,
        difference=difference,
        allowed=allowed,
        rounding=rounding,
        from_base=from_base,
        base=base,
        written=[],
    )
    exported.written.extend(write_card(model, half, to.absolute().name, exported, tell, given.tools))
    _finish(half, to)
    return exported


@contextlib.contextmanager
def _half(to: Path) -> Iterator[Path]:
    """Make the folder that an export is written into, and remove it when it is not finished.

    Raises:
        ConfigError: The target is taken, or another export writes it.
    """
    if to.is_symlink() or os.path.ismount(to):
        raise ConfigError(f"--to {str(to)!r} is a link or a mounted folder, in whose place no folder can be put; name "
                          "a new folder in it")  # fmt: skip
    if os.path.lexists(to) and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to {str(to)!r} exists; name a new folder, or remove this one")
    if not to.name or to.name == ".." or not str(to).isprintable():  # bytes that are not UTF-8, too
        raise ConfigError(f"--to {str(to)!r}: expected a folder with a name that can be printed; name another one")
    half = to.absolute().with_name(f".{to.absolute().name}.half")
    if half.is_symlink() or (half.is_dir() and any(half.iterdir()) and not (half / ".lock").is_file()):
        raise ConfigError(f"{str(half)!r}, in which --to {str(to)!r} would be made, is none that an export left; move "
                          "it, or name another folder")  # fmt: skip
    try:
        half.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(half / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"--to {str(to)!r} cannot be made ({error}); name another folder") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"--to {str(to)!r}: another export writes it; wait for its end") from None
        if not (half / ".lock").exists() or not os.path.samestat(os.fstat(descriptor), os.stat(half / ".lock")):
            raise ConfigError(f"--to {str(to)!r}: another export has just written it; name another folder")
        _empty(half)  # the rest of a killed export
        try:
            yield half
        except BaseException:  # half an export is none
            shutil.rmtree(half, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _finish(half: Path, to: Path) -> None:
    os.rename(half, to)  # with its lock: without it another export could begin in the whole folder
    (to / ".lock").unlink()


def _read(model: Model, given: UserFiles, tell: Callable[[str], None]) -> _Weights:
    if not model.ranks:
        tell(f"reading {model.folder}")
        with bounded_models(*tensor_sizes(model.folder)):
            plain = dict(load_folder(model.folder, "auto", given.model_code).state_dict())
        return _Weights(plain, None, plain)
    tensors = read_shards(model.shards(), tell)
    if not has_adapter(tensors):
        return _Weights(tensors, None, tensors)
    base, lora = split_lora(tensors, model)
    if not has_base(tensors):
        base = _base_of(model, given, str(next(iter(lora.parts.values()))[0].dtype).removeprefix("torch."))
    layers = len(lora.parts)
    tell(f"merging LoRA of rank {max(lora.ranks.values())}, alpha {lora.alpha:g}, in {layers} layers, in float32")
    return _Weights(base, lora, merge_lora(base, lora))


def _base_of(model: Model, given: UserFiles, dtype: str) -> dict[str, Tensor]:
    """Return the base's weights for a checkpoint that has the adapter alone."""
    folder = base_folder(model, given)
    if folder is None:
        raise ConfigError(
            f"{str(model.folder)!r} has the adapter alone, and its base "
            f"({model.setting('actor_rollout_ref.model.path')!r}) is not here, or not of a run of yours; name its "
            "folder with --base"
        )
    return dict(load_folder(folder, dtype, given.model_code).state_dict())


def base_folder(model: Model, given: UserFiles = NOTHING_GIVEN) -> Path | None:
    """Return the folder of the model that the run began with; None: it is not known, or not on this machine.

    A path out of a run's folder, or a hub's name, is followed in a run of the user's own alone, and nothing is fetched.

    Args:
        model: The model.
        given: The user's values; their `base` is taken first.

    Raises:
        ConfigError: The base that the user gives is not a model's folder, or leads out of it.
    """
    if given.base is not None:
        base = find_model(given.base)
        if base.ranks:
            raise ConfigError(f"--base {str(given.base)!r} is a checkpoint; name a Hugging Face folder, as export "
                              "writes it")  # fmt: skip
        return base.folder
    path = model.setting("actor_rollout_ref.model.path")
    if not isinstance(path, str):
        return None
    place = model.named_path(path)
    if place is not None and (place / "config.json").is_file():
        require_plain_folder(place)
        return place
    if not model.is_own:
        return None
    from huggingface_hub import snapshot_download

    with contextlib.suppress(Exception):  # a name that is none of the hub's, or a model that is not in the cache
        return Path(snapshot_download(path, local_files_only=True))
    return None


def _untied(tensors: Mapping[str, Tensor], config: Any, trusts_code: bool) -> dict[str, Tensor]:
    """Return the tensors that a file of a model has: of tied ones the first alone.

    Raises:
        ConfigError: A tensor is missing or too many, or tensors differ that are one in the configuration.
    """
    import torch

    model = empty_model(config, torch.float32, trusts_code)
    expected = dict(model.state_dict())
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise ConfigError(f"the weights have {unknown[0]!r}, which the model of its config.json has not; name another "
                          "checkpoint")  # fmt: skip
    model.tie_weights()
    aliases = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    whole = dict(tensors)
    for first, *others in aliases.values():
        there = [name for name in (first, *others) if name in whole]
        for name in there[1:]:
            if not torch.equal(whole[name], whole[there[0]]):
                raise ConfigError(
                    f"config.json ties {name!r} to {there[0]!r}, and the checkpoint has two that differ; set "
                    "tie_word_embeddings to false in the checkpoint's huggingface/config.json"
                )
            del whole[name]
        expected = {name: tensor for name, tensor in expected.items() if name not in others or name in whole}
        if there and there[0] != first:
            expected.pop(first, None)
    if missing := sorted(expected.keys() - whole.keys()):
        raise ConfigError(f"the weights lack {missing[0]!r}, which the model of its config.json has; name another "
                          "checkpoint")  # fmt: skip
    return whole


def _in_dtype(merged: Mapping[str, Tensor], plain: Mapping[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
    """Return weights in a data type, or in the trainer's. Values that are not floating point numbers stay."""
    import torch

    return {
        name: tensor.to(plain[name].dtype if dtype is None else getattr(torch, dtype)).contiguous()
        if tensor.is_floating_point()
        else tensor.contiguous()
        for name, tensor in merged.items()
    }


def _write(model: Model, half: Path, config: Any, target: dict[str, Tensor], trusts_code: bool) -> None:
    """Write configuration, tokenizer and weights."""
    from safetensors import SafetensorError

    for path in model.described.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, half / path.name)
    kinds = [tensor.dtype for tensor in target.values() if tensor.is_floating_point()]
    empty = empty_model(config, max(set(kinds), key=kinds.count), trusts_code)
    generation = half / "generation_config.json"
    kept = generation.read_bytes() if generation.is_file() else None  # transformers writes its own
    try:
        empty.save_pretrained(half, state_dict=dict(target), max_shard_size=_LARGEST_FILE)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    for path in half.glob("*.safetensors"):  # safetensors makes them readable for their owner alone
        path.chmod(stat.S_IMODE((half / "config.json").stat().st_mode))
    if kept is not None:
        generation.write_bytes(kept)


def _check(
    config: Any, weights: _Weights, target: Mapping[str, Tensor], written: Tensor, trusts_code: bool
) -> tuple[float, float, float | None]:
    """Compare the folder's logits with the checkpoint's; return their difference, the largest allowed, and rounding's.

    Rounded weights have other logits. So the folder's are compared with those of the rounded tensors, and before
    rounding the merged weights' with those of base and adapter.

    Raises:
        ExportError: They differ.
    """
    if weights.lora is None:
        trained = logits_of_tensors(config, weights.plain, trusts_code)
    else:
        trained = logits_with_adapter(config, weights.plain, weights.lora, trusts_code)
    allowed = max(_TOLERANCE, _SHARE * float(trained.abs().max()))
    rounding = None
    if all(target[name].dtype == weights.merged[name].dtype for name in target):
        difference = _largest(trained, written)
    else:
        difference = _largest(logits_of_tensors(config, target, trusts_code), written)
        if weights.lora is not None:
            unmerged = _largest(logits_of_tensors(config, weights.merged, trusts_code), trained)
            difference = max(unmerged, difference) if difference <= allowed else difference  # `max` may lose a NaN
        rounding = _largest(trained, written)
    if not (math.isfinite(allowed) and difference <= allowed):  # NaN, too
        raise ExportError(
            f"the folder's logits differ from the checkpoint's by {difference:.3g}, and {allowed:.1g} is allowed; "
            "nothing is written"
        )
    return difference, allowed, rounding


def _largest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; NaN where one is NaN, infinity where the shapes differ."""
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")


def _compare_with_base(
    model: Model, written: Tensor, given: UserFiles, tell: Callable[[str], None]
) -> tuple[str | None, float | None]:
    """Return the hash of the base's weights, and how far the logits are from its; None each: it is not at hand."""
    folder = base_folder(model, given)
    if folder is None:
        return None, None
    tell("comparing with the base, which the run began with")
    try:
        hashed, apart = model_hash(folder), _largest(logits_of_folder(folder, given.model_code), written)
        if not math.isfinite(apart):
            tell("the base's logits cannot be compared: they are no finite numbers, or of another shape")
        return hashed, apart if math.isfinite(apart) else None
    except ConfigError as error:
        tell(f"the base is not compared: {error}")
        return None, None
