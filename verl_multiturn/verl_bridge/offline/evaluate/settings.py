"""The configuration of an evaluation: a recipe's, as its training has it, with another model and other rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.benchmarks.protocol import NamedBenchmark
from verl_multiturn.evaluation.chat_address import ChatAddress, chat_address
from verl_multiturn.evaluation.plan import DataRow, numbered
from verl_multiturn.records.read.origin import refuse_other
from verl_multiturn.records.write.run_file import digest
from verl_multiturn.rows.files import read_rows, row_digest
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import RunPlan
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.offline.evaluate import chat_level
from verl_multiturn.verl_bridge.settings import ADAPTER_RANKS
from verl_multiturn.verl_bridge.startup.configuration import check_run
from verl_multiturn.verl_bridge.startup.view import RunView
from verl_multiturn.verl_bridge.trainer.run_notes import reward_function

_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL_CODE = "actor_rollout_ref.model.trust_remote_code"
_READ = (".parquet", ".jsonl", ".json")
_VOLATILE = ("record_dir", "record_start", "record_share", "record_max_gb", "record_redact", "derived")


@dataclass(frozen=True)
class Job:
    """The settings of an evaluation."""

    plan: RunPlan
    """The recipe; its `out` is the folder of this evaluation."""
    model: Path
    """Folder of the model in the form of Hugging Face."""
    weights: str
    """Hash of its weights."""
    named: str
    """The model as the user named it."""
    rows: tuple[Path, ...] | None = None
    """Files of rows; None: those of the recipe's validation."""
    only: str | None = None
    samples: int | None = None
    temperature: float | None = None
    engine: str = "sglang"
    """`sglang`, or the address of an endpoint."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """The model's origin from the file of the run (`schema.RunFile`), as far as it is known."""
    runs_code: bool | None = None
    """Whether the model's own Python files run; None: as in the recipe."""
    benchmark: NamedBenchmark | None = None
    """The benchmark that the recipe and its overrides are; None: no benchmark by name."""

    @property
    def out(self) -> Path:
        """Folder of the evaluation."""
        return self.plan.out

    @property
    def chat(self) -> ChatAddress | None:
        """The model behind chat completions; None where the engine is another."""
        return chat_address(self.engine)

    @property
    def judged(self) -> str:
        """The model's name in the records: the hash of its weights, or the name of one behind an endpoint."""
        return self.weights if self.chat is None else self.chat.name


def config_of(job: Job, start: str) -> DictConfig:
    """Return verl's whole configuration for an evaluation, checked and completed as for a training.

    Args:
        job: The evaluation's settings.
        start: Name of this start.

    Raises:
        ConfigError: The recipe cannot work here.
    """
    config: DictConfig = compose_run(job.plan)
    values: dict[str, Any] = {
        "actor_rollout_ref.model.path": str(job.model),
        f"{PATH}.record_dir": str(job.out / "records"),
        f"{PATH}.derived.record_start": start,
        f"{PATH}.record_share": 1.0,
        f"{PATH}.record_max_gb": None,
    }
    # An exported model holds its adapter.
    values |= {key: 0 for key in ADAPTER_RANKS if OmegaConf.select(config, key)}
    if job.runs_code is not None:  # the recipe speaks of its own model
        values[_MODEL_CODE] = job.runs_code
    if job.rows is not None:
        files = [str(path) for path in job.rows]
        values |= {"data.val_files": files, "data.train_files": files}
    if job.samples is not None:
        values[f"{_ROLLOUT}.val_kwargs.n"] = job.samples
    if job.temperature is not None:
        values[f"{_ROLLOUT}.val_kwargs.temperature"] = job.temperature
        values[f"{_ROLLOUT}.val_kwargs.do_sample"] = job.temperature > 0
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)
    check_run(config, is_training=False)
    if job.chat is not None:
        chat_level.prepare(config)
    return config


def benchmark_of(job: Job, config: DictConfig, rows: int) -> dict[str, Any]:
    """Return the entry `benchmark` of `evaluation.json`: its name and its departures; {} without one.

    Args:
        job: The evaluation's settings.
        config: The whole configuration, with the user's options in it.
        rows: Number of rows.
    """
    if job.benchmark is None:
        return {}
    params = config.actor_rollout_ref.rollout.val_kwargs
    sampled = {
        "n": int(params.n),
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "length": int(config.data.max_response_length),
        "size": rows,
    }
    departures = job.benchmark.departures(sampled) + _context(job, config)
    return {"benchmark": {"name": job.benchmark.name, "departures": departures}}


def _context(job: Job, config: DictConfig) -> list[str]:
    """Return the departure of a model whose context ends a conversation before its length does; [] for another."""
    if job.chat is not None:  # the context of a model behind an endpoint is not known
        return []
    run = RunView(config)
    most = min(filter(None, (run.rollout.max_model_len, run.model_tokens)), default=None)
    if most is None or most > run.longest_row:
        return []
    return [f"a context of {most} tokens, where prompt and response may have {run.longest_row}"]


def data_rows(config: DictConfig, dataset: Any) -> list[DataRow]:
    """Return the rows of verl's data set, with their numbers in their files.

    Raises:
        ConfigError: A file cannot be read, or the data set is not of its rows.
    """
    listed = config.data.val_files
    files = [listed] if isinstance(listed, str) else list(listed)
    digests = [row_digest(row) for file in files for row in read_rows(Path(file), _READ)]
    held = getattr(dataset, "dataframe", None)
    if held is None:
        raise ConfigError(
            f"data.custom_cls={type(dataset).__name__}: eval knows the rows of verl's RLHFDataset and its "
            "subclasses; derive yours from it"
        )
    kept = [held[place] for place in range(len(held))]
    marks = [row_digest(row) for row in kept]
    return [
        DataRow(number, mark, str(row.get("data_source", "")), place)
        for place, (number, mark, row) in enumerate(zip(numbered(digests, marks), marks, kept, strict=True))
    ]


def settings_digest(config: DictConfig) -> str:
    """Return the digest of the settings of a conversation, beside model, rows and reward; a resume compares it."""
    rollout: Any = OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=True)
    given = rollout["custom"]["multiturn"]
    # The digests of evaluations of earlier versions have this state among the settings.
    ours = {key: value for key, value in {**given, **given["derived"]}.items() if key not in _VOLATILE}
    names = ("prompt_length", "response_length", "multi_turn", "agent", "val_kwargs")
    told = {name: rollout.get(name) for name in names} | {"multiturn": ours}
    told["template"] = OmegaConf.to_container(config.data, resolve=True).get("apply_chat_template_kwargs")  # type: ignore[union-attr]
    return digest(json.dumps(told, sort_keys=True, default=str).encode())[:16]


def reward_digest(config: DictConfig) -> str:
    """Return the digest of the reward: the file of its function, its arguments and its manager."""
    reward: Any = OmegaConf.to_container(config.reward, resolve=True)
    function = reward_function(config)
    told = [function.get("name"), function.get("digest"), reward.get("reward_manager")]
    told.append((reward.get("custom_reward_function") or {}).get("reward_kwargs"))
    return digest(json.dumps(told, sort_keys=True, default=str).encode())[:16]


def check_origin(origin: Mapping[str, Any], model: LoadedModel, schemas: Sequence[Any]) -> None:
    """Refuse another tokenizer, template or set of tools than those that the model was trained with.

    Args:
        origin: File of the run that the model comes from.
        model: The model.
        schemas: Schemas of the recipe's tools.

    Raises:
        ConfigError: One is another.
    """
    remedies = dict.fromkeys(("tokenizer", "template", "tools"), "say --anyway to evaluate the model all the same")
    refuse_other(origin, remedies, vocabulary=model.tokenizer.get_vocab(), template=model.template, schemas=schemas)
