"""The part of the start-up check about files and folders, which verl looks for only after Ray has started."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic

from verl_multiturn.config import PATH
from verl_multiturn.describe import did_you_mean
from verl_multiturn.errors import ConfigError

_ACTOR = "actor_rollout_ref.model"
_SUFFIXES = (".parquet", ".json", ".jsonl")
_RESUMES = ("auto", "disable", "resume_path")
_CHECKPOINT = re.compile(r".*global_step_\d+")
# A name on the hub is NAME or OWNER/NAME.
_IS_PATH = re.compile(r"[/~]|\.{1,2}(/|$)|[^/]*/[^/]*/", re.DOTALL)


def check_paths(config: DictConfig) -> None:
    """Check that what verl will read is there and that its folders can be written; make paths of models absolute.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: a file or folder is missing, empty or of another kind; the message names the setting and its value.
    """
    for key in _models(config):
        _check_model(config, key)
    _check_template_text(config)
    if not OmegaConf.select(config, "data.custom_cls.path"):  # a class of the user's own reads what it likes
        for key in ("data.train_files", "data.val_files"):
            _check_rows(config, key)
    _check_resume(config)
    for key in _written(config):
        _check_written(key, OmegaConf.select(config, key))


def _models(config: DictConfig) -> Iterator[str]:
    """Yield the settings that name models which the run loads."""
    yield f"{_ACTOR}.path"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl tells it itself when the algorithm has no critic
        if need_critic(config):
            yield "critic.model.path"
    for section, key in (("reward.reward_model", "model_path"), ("reward_model", "model.path")):
        # verl's older section, without `reward.`, may set each key by itself.
        enabled = any(OmegaConf.select(config, f"{name}.enable") for name in (section, "reward_model"))
        if enabled and OmegaConf.select(config, f"{section}.{key}") is not None:
            yield f"{section}.{key}"
    if OmegaConf.select(config, "distillation.enabled"):
        yield from (
            f"distillation.teacher_models.{name}.model_path"
            for name, teacher in (OmegaConf.select(config, "distillation.teacher_models") or {}).items()
            if OmegaConf.is_dict(teacher) and teacher.get("model_path") is not None
        )
    optional = [f"{_ACTOR}.{name}" for name in ("tokenizer_path", "hf_config_path", "lora_adapter_path")]
    yield from (key for key in optional if OmegaConf.select(config, key) is not None)


def _check_model(config: DictConfig, key: str) -> None:
    """Refuse a model that is neither a folder of one nor a name on the hub, and make a folder's path absolute."""
    value = OmegaConf.select(config, key)
    expected = "expected the folder of a model, or a model's name on the Hugging Face hub (OWNER/NAME)"
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}={value!r}: {expected}; set it")
    if value.startswith("hdfs://"):
        return
    path = Path(value).expanduser()
    is_adapter = key.endswith("lora_adapter_path")
    if not path.exists():
        if is_adapter or _IS_PATH.match(value):
            raise ConfigError(f"{key}={value!r}: there is no such folder; {expected}; correct the path")
        return
    if not path.is_dir():
        raise ConfigError(f"{key}={value!r} is a file, {expected}; name the folder that it lies in")
    weights = not is_adapter and not key.endswith("tokenizer_path")
    elsewhere = key == f"{_ACTOR}.path" and OmegaConf.select(config, f"{_ACTOR}.hf_config_path") is not None
    if weights and not elsewhere and not (path / "config.json").is_file():
        raise ConfigError(f"{key}={value!r} has no config.json; {expected}; name the folder that has it")
    OmegaConf.update(config, key, os.path.abspath(path))  # verl takes neither `~` nor a slash at the end


def _check_template_text(config: DictConfig) -> None:
    """Refuse a path in the place of a chat template's text: every prompt would be that path."""
    key = f"{_ACTOR}.custom_chat_template"
    text = OmegaConf.select(config, key)
    if text is not None and "{" not in str(text):
        raise ConfigError(
            f"{key}={text!r}: this is a path or a plain text, and verl takes the text of the template itself; put the "
            "file's text into a YAML file of settings, or into the model's folder as chat_template.jinja"
        )


def _check_rows(config: DictConfig, key: str) -> None:
    listed = OmegaConf.select(config, key)
    files = [listed] if isinstance(listed, str) else list(listed or [])
    if not files:
        raise ConfigError(f"{key}={listed!r}: it names no file; name one that ends in {_named(_SUFFIXES)}")
    for file in map(str, files):
        _check_file(f"{key}: {file!r}", file)


def _check_file(where: str, file: str) -> None:
    """Refuse a file that verl's data set cannot read, or that has no rows."""
    if not file.endswith(_SUFFIXES):
        raise ConfigError(f"{where}: expected a file that ends in {_named(_SUFFIXES)}; write the rows into one")
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
    try:
        if path.suffix == ".parquet":
            some = pyarrow.parquet.read_metadata(path).num_rows > 0
        else:
            with path.open("rb") as lines:
                some = any(line.strip() for line in lines)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{where} cannot be read ({error}); write the rows again") from None
    if not some:
        raise ConfigError(f"{where} has no rows; write some")


def _named(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _check_resume(config: DictConfig) -> None:
    """Check the checkpoint that the run goes on from; verl looks for it when all models are loaded."""
    trainer = config.trainer
    mode, path = trainer.resume_mode, trainer.get("resume_from_path")
    where = f"trainer.resume_from_path={path!r}"
    if mode not in _RESUMES:
        hint = did_you_mean(str(mode), _RESUMES)
        raise ConfigError(f"trainer.resume_mode={mode!r}: expected one of {list(_RESUMES)}{hint and '; ' + hint}")
    if mode == "auto" and path:
        raise ConfigError(
            f"{where} has no effect with trainer.resume_mode=auto; set trainer.resume_mode=resume_path, or leave it out"
        )
    if mode != "resume_path":
        return
    if not isinstance(path, str) or not _CHECKPOINT.fullmatch(path):
        raise ConfigError(
            f"{where}: expected the folder global_step_N of a checkpoint, without a slash at its end; write its path"
        )
    if not Path(path).is_dir():
        raise ConfigError(f"{where}: there is no such folder; correct the path")
    if not (Path(path) / "actor").is_dir():
        raise ConfigError(f"{where} has no folder 'actor', so it has no weights; name another checkpoint")


def _written(config: DictConfig) -> Iterator[str]:
    """Yield the settings that name folders which the run writes."""
    if config.trainer.save_freq > 0:
        yield "trainer.default_local_dir"
    yield from ("trainer.rollout_data_dir", "trainer.validation_data_dir", f"{PATH}.record_dir")


def _check_written(key: str, value: Any) -> None:
    """Refuse a folder that cannot be made or written; nothing is made here."""
    if value is None or "://" in str(value):
        return
    path = Path(os.path.abspath(str(value)))
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return
    why = f"{str(there)!r} may not be written to" if there.is_dir() else f"{str(there)!r} is no folder"
    raise ConfigError(f"{key}={str(value)!r} cannot be written: {why}; name another folder")
