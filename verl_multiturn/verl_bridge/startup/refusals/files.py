"""Refusals about files and folders, which verl looks for only after Ray has started."""

from __future__ import annotations

import codecs
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
from omegaconf import OmegaConf

from verl_multiturn.config import PATH
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError
from verl_multiturn.paths import at_home
from verl_multiturn.rows.files import refuse_encoding, refuse_pointer
from verl_multiturn.verl_bridge.startup.table import Check, RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

_MODEL = "actor_rollout_ref.model"
_TEMPLATE = f"{_MODEL}.custom_chat_template"
_SUFFIXES = (".parquet", ".json", ".jsonl")
_ENDS = f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
_MODE, _RESUME = "trainer.resume_mode", "trainer.resume_from_path"
_RESUMES = ("auto", "disable", "resume_path")
_CHECKPOINT = re.compile(r".*global_step_\d+")
# A name on the hub is NAME or OWNER/NAME.
_IS_PATH = re.compile(r"[/~]|\.{1,2}(/|$)|[^/]*/[^/]*/", re.DOTALL)


def check_models(run: RunView) -> None:
    """Refuse a model that is neither a folder of one nor may be a name on the hub."""
    for key in models_of(run):
        _check_model(run, key)


def models_of(run: RunView) -> Iterator[str]:
    """Yield the settings that name models which the run loads."""
    yield f"{_MODEL}.path"
    if run.has_critic:
        yield "critic.model.path"
    for section, key in (("reward.reward_model", "model_path"), ("reward_model", "model.path")):
        # verl's older section, without `reward.`, may set each key by itself.
        enabled = any(run.value(f"{name}.enable") for name in (section, "reward_model"))
        if enabled and run.is_set(f"{section}.{key}"):
            yield f"{section}.{key}"
    if run.value("distillation.enabled"):
        yield from (
            f"distillation.teacher_models.{name}.model_path"
            for name, teacher in (run.value("distillation.teacher_models") or {}).items()
            if OmegaConf.is_dict(teacher) and teacher.get("model_path") is not None
        )
    optional = [f"{_MODEL}.{name}" for name in ("tokenizer_path", "hf_config_path", "lora_adapter_path")]
    yield from filter(run.is_set, optional)


def _check_model(run: RunView, key: str) -> None:
    value = run.value(key)
    expected = "expected the folder of a model, or a model's name on the Hugging Face hub (OWNER/NAME)"
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}={value!r}: {expected}; set it")
    if value.startswith("hdfs://"):
        return
    path = Path(value).expanduser()
    if run.will_be_made(path):
        return
    is_adapter = key.endswith("lora_adapter_path")
    if not path.exists():
        if is_adapter or _IS_PATH.match(value):
            raise ConfigError(f"{key}={value!r}: there is no such folder; {expected}; correct the path")
        return
    if not path.is_dir():
        raise ConfigError(f"{key}={value!r} is a file, {expected}; name the folder that it lies in")
    weights = not is_adapter and not key.endswith("tokenizer_path")
    elsewhere = key == f"{_MODEL}.path" and run.is_set(f"{_MODEL}.hf_config_path")
    refuse_pointer(path)
    if weights and not elsewhere and not (path / "config.json").is_file():
        raise ConfigError(f"{key}={value!r} has no config.json; {expected}; name the folder that has it")


def check_data(run: RunView) -> None:
    """Refuse data files that verl cannot read, or that have no rows; with `data.custom_cls` any file will do."""
    if run.value("data.custom_cls.path"):  # a class of the user's own reads any file
        return
    for key in ("data.train_files", "data.val_files"):
        listed = run.value(key)
        files = [listed] if isinstance(listed, str) else list(listed or [])
        if not files:
            raise ConfigError(f"{key}={listed!r}: it names no file; name one that ends in {_ENDS}")
        for file in map(str, files):
            if not run.will_be_made(file):
                _check_file(f"{key}: {file!r}", file)


def _check_file(where: str, file: str) -> None:
    if not file.endswith(_SUFFIXES):
        raise ConfigError(f"{where}: expected a file that ends in {_ENDS}; write the rows into one")
    if "://" in file:
        return
    path = Path(file).expanduser()
    if glob.has_magic(file) and not path.exists():
        if not glob.glob(str(path), recursive=True):
            raise ConfigError(f"{where} matches no file; correct the pattern, or write the rows")
        return
    if path.is_dir():
        return
    if not path.is_file():
        raise ConfigError(f"{where} is no file; correct the path, or write the rows")
    refuse_pointer(path)
    try:
        if path.suffix == ".parquet":
            some = pyarrow.parquet.read_metadata(path).num_rows > 0
        else:
            refuse_encoding(path)
            with path.open("rb") as lines:
                some = any(line.removeprefix(codecs.BOM_UTF8).strip() for line in lines)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{where} cannot be read ({error}); write the rows again") from None
    if not some:
        raise ConfigError(f"{where} has no rows; write some")


def check_resume_mode(run: RunView) -> None:
    """Refuse a `trainer.resume_mode` that verl does not know."""
    if (mode := run.value(_MODE)) not in _RESUMES:
        hint = did_you_mean(str(mode), _RESUMES)
        raise ConfigError(f"{_MODE}={mode!r}: expected one of {list(_RESUMES)}{hint and '; ' + hint}")


def _resumes_from(run: RunView) -> str | None:
    """Return the checkpoint that the run has to resume from; verl looks for it when all models are loaded."""
    return str(at_home(run.value(_RESUME))) if run.value(_MODE) == "resume_path" else None


def _is_missing(run: RunView, folder: str) -> bool:
    path = _resumes_from(run)
    return path is not None and not (Path(path) / folder).is_dir()


def check_written(run: RunView) -> None:
    """Refuse a folder that cannot be made or written; nothing is made here."""
    keys = ["trainer.default_local_dir"] if run.config.trainer.save_freq > 0 else []
    keys += ["trainer.rollout_data_dir", "trainer.validation_data_dir", f"{PATH}.record_dir"]
    for key in keys:
        value = OmegaConf.select(run.config, key)
        if value is None or "://" in str(value):
            continue
        path = Path(os.path.abspath(str(at_home(value))))
        there = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = f"{str(there)!r} may not be written to" if there.is_dir() else f"{str(there)!r} is no folder"
            raise ConfigError(f"{key}={str(value)!r} cannot be written: {why}; name another folder")


FILES: list[Check] = [
    check_models,
    RefusalRow(
        _TEMPLATE,
        when=lambda run: run.is_set(_TEMPLATE) and "{" not in str(run.value(_TEMPLATE)),
        why="this is a path or a plain text, and verl takes the text of the template itself",
        remedy="put the file's text into a YAML file of settings, or into the model's folder as chat_template.jinja",
    ),
    check_data,
    RefusalRow(
        "algorithm.adv_estimator",
        when=lambda run: (
            run.has_own_estimator
            and (file := run.estimator.rpartition(":")[0]).endswith(".py")
            and not Path(file).expanduser().is_file()
        ),
        why="there is no such file",
        remedy="correct the path, which begins in the folder of the start",
    ),
    check_resume_mode,
    RefusalRow(
        _RESUME,
        when=lambda run: run.value(_MODE) == "auto" and run.value(_RESUME),
        why=f"it has no effect with {_MODE}=auto",
        remedy=f"set {_MODE}=resume_path, or leave it out",
    ),
    RefusalRow(
        _RESUME,
        when=lambda run: (path := _resumes_from(run)) is not None and not _CHECKPOINT.fullmatch(path),
        why="expected the folder global_step_N of a checkpoint, without a slash at its end",
        remedy="write its path",
    ),
    RefusalRow(
        _RESUME,
        when=lambda run: _is_missing(run, ""),
        why="there is no such folder",
        remedy="correct the path",
    ),
    RefusalRow(
        _RESUME,
        when=lambda run: _is_missing(run, "actor"),
        why="it has no folder 'actor', so it has no weights",
        remedy="name another checkpoint",
    ),
    check_written,
]
