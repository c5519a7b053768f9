"""A run's data about its model, in the model's folder: chat template, tools, sampling, and a card to read.

Invariants:
- everything comes from the run's own files; data that they lack is omitted, or the card marks it as unknown;
- the run may be somebody else's: nothing of it is imported or started, and its texts are shown as texts, on one line;
- no secret, no variable of the environment, and no path of this machine, is written.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_multiturn.advantages.estimators import is_own_function
from verl_multiturn.errors import ConfigError
from verl_multiturn.models.export_result import TOOLS, ExportReport, is_schema
from verl_multiturn.models.location import Model
from verl_multiturn.observe.metric_files import REWARD, metric_files, read_metrics
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.write.configuration_secrets import without_secrets
from verl_multiturn.tools.loading.registry import load_tools, schema_of

TEMPLATE, GENERATION, CARD = "chat_template.jinja", "generation_config.json", "README.md"
_ROLLOUT = "actor_rollout_ref.rollout"
_SCORE = re.compile(r"val-core/(.*)/(acc|reward)/mean@(\d+)")
_TOOL_FILES = (
    f"{_ROLLOUT}.multi_turn.tool_config_path",
    f"{_ROLLOUT}.multi_turn.function_tool_path",
    f"{_ROLLOUT}.custom.multiturn.derived.tool_config_path",
)
_CERTIFICATE = "rollout/certificate/"
_MOST_ROWS, _MOST_SCORES, _MOST_CHARACTERS = 24, 4, 200
_PLAIN = re.compile(r"[\w .,:;/@+=%~()?!'\"*{}$#^-]*", re.ASCII)
_MARKS = re.compile(r"([\\`*_\[\]{}#!|~])")
"""Characters that Markdown may read as more than themselves."""
# Entries about sampling, and the mark that transformers itself may set them.
_SAMPLING = (
    "_from_model_config",
    "do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h",
    "repetition_penalty", "num_beams", "penalty_alpha",
)  # fmt: skip
_SETTINGS = (
    "algorithm.adv_estimator", "algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.fsdp_config.dtype", "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora_alpha", "data.train_batch_size", "data.seed", f"{_ROLLOUT}.name", f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.temperature", f"{_ROLLOUT}.top_p", f"{_ROLLOUT}.top_k", f"{_ROLLOUT}.prompt_length",
    f"{_ROLLOUT}.response_length", f"{_ROLLOUT}.agent.default_agent_loop", f"{_ROLLOUT}.multi_turn.format",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns", f"{_ROLLOUT}.multi_turn.max_user_turns",
    f"{_ROLLOUT}.multi_turn.max_parallel_calls", f"{_ROLLOUT}.multi_turn.max_tool_response_length",
    f"{_ROLLOUT}.val_kwargs.do_sample", f"{_ROLLOUT}.val_kwargs.temperature", f"{_ROLLOUT}.val_kwargs.n",
    "trainer.v1.trainer_mode", "trainer.total_training_steps", f"{_ROLLOUT}.custom.multiturn.advantage.options",
)  # fmt: skip


def write_card(
    model: Model, folder: Path, name: str, facts: ExportReport, tell: Callable[[str], None], tools: Path | None = None
) -> list[str]:
    """Write the data of the model's run into its folder, and return the names of the files.

    Args:
        model: The model. Without a run only the card is written, or a sentence is added to one that is there.
        folder: The folder, with configuration, tokenizer and weights.
        name: The model's name in the card.
        facts: The export's report.
        tell: Gets a line about a file that cannot be written.
        tools: A tools YAML of the user's, in the place of the run's records.

    Raises:
        OSError: A file cannot be written.
        ConfigError: The checkpoint's `generation_config.json` is damaged, or the user's tools cannot be loaded.
    """
    run = run_file_of(model)
    written = []
    template = run.get("template")
    if isinstance(template, Mapping) and isinstance(text := template.get("text"), str):
        (folder / TEMPLATE).write_text(text, encoding="utf-8", errors="replace")
    if (folder / TEMPLATE).is_file():
        written.append(TEMPLATE)
    schemas = _schemas(model, run, tools, tell)
    if schemas is not None:
        text = json.dumps(schemas, indent=2, ensure_ascii=False) + "\n"
        (folder / TOOLS).write_text(text, encoding="utf-8", errors="replace")
        written.append(TOOLS)
    if (sampling := _sampling(model, folder)) is not None:
        (folder / GENERATION).write_text(json.dumps(sampling, indent=2) + "\n", encoding="utf-8")
        written.append(GENERATION)
    path = folder / CARD
    if model.run is None and path.is_file():
        card = path.read_text(encoding="utf-8", errors="replace").rstrip("\n") + _written_again(facts)
    else:
        card = "\n".join(_card(model, run, folder, name, schemas, facts)) + "\n"
    path.write_text(card, encoding="utf-8")
    return [*written, CARD]


def _written_again(facts: ExportReport) -> str:
    """Return the addition to the card of a folder that is written again: the text above is about the earlier folder."""
    rounded = "" if facts.rounding is None else f", whose rounding changed logits by at most {facts.rounding:.1e}"
    return f"\n\nWritten again by `verl-multiturn export`: weights `{facts.model}`, {facts.dtype}{rounded}.\n"


def run_file_of(model: Model) -> Mapping[str, Any]:
    """Return the run's file of the newest start; {}: the run has no records."""
    if model.run is None:
        return {}
    noted = model.setting(f"{_ROLLOUT}.custom.multiturn.record_dir")
    named: list[str | Path] = [model.run / "records", *([noted] if isinstance(noted, str) else [])]
    for each in named:
        place = model.named_path(each)
        if place is not None and place.is_dir() and (runs := Records(place).runs):
            return runs[-1]
    return {}


def _schemas(model: Model, run: Mapping[str, Any], tools: Path | None, tell: Callable[[str], None]) -> list[Any] | None:
    """Return the schemas of the tools: of the user's YAML, else those that the run's template got; None: not known."""
    if tools is not None:
        return [schema_of(tool).as_dict() for tool in load_tools(str(tools)).values()]
    recorded = run.get("schemas")
    if isinstance(recorded, list) and recorded and all(map(is_schema, recorded)):
        return list(recorded)
    if recorded or any(map(model.setting, _TOOL_FILES)):
        tell(f"{TOOLS} is not written: the run has no records with the schemas of its tools, and the file that its "
             "configuration names is a program; give the tools with --tools FILE")  # fmt: skip
    return None


def _sampling(model: Model, folder: Path) -> dict[str, Any] | None:
    """Return `generation_config.json` with the sampling of the run's training; None: the run is not known.

    "The whole vocabulary" is -1 to SGLang and vLLM and 0 to transformers, each of which refuses the other's. The size
    of the vocabulary means it to all of them; omitted, it is 50 to transformers.
    """
    rollout = {key: model.setting(f"{_ROLLOUT}.{key}") for key in ("temperature", "top_p", "top_k")}
    if not isinstance(rollout["temperature"], int | float):
        return None
    path = folder / GENERATION
    try:
        base = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        kept = {key: value for key, value in base.items() if key not in _SAMPLING}
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError(f"the checkpoint's {GENERATION} is no JSON object; mend it, or remove it") from None
    if rollout["temperature"] == 0:
        return {**kept, "do_sample": False}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = (config.get("text_config") or config).get("vocab_size")
    top_k = rollout["top_k"] if isinstance(rollout["top_k"], int) and rollout["top_k"] > 0 else size
    top_p = rollout["top_p"] if isinstance(rollout["top_p"], int | float) else 1.0
    sampling = {"do_sample": True, "temperature": float(rollout["temperature"]), "top_p": float(top_p), "top_k": top_k}
    return {**kept, **sampling}


def _card(
    model: Model, run: Mapping[str, Any], folder: Path, name: str, schemas: Sequence[Any] | None, facts: ExportReport
) -> Iterator[str]:
    """Yield the lines of the card."""
    base = model.setting("actor_rollout_ref.model.path")
    yield from ("---", "library_name: transformers", "tags: [verl, reinforcement-learning, tool-use]", "---", "")
    step = "" if model.step is None else f" after step {model.step}"
    recipe = model.setting("recipe.name")
    yield from (f"# {name}", "")
    source = f"a run of the recipe {_code(recipe)}" if recipe else "a run" if model.run else "a folder"
    yield f"The model of {source}{step}. `verl-multiturn export` wrote this page from the run's own files."
    yield from ("", "| | |", "|---|---|")
    yield f"| weights | `{facts.model}` (`models/hash.py`), {facts.parameters:,} parameters, {facts.dtype} |"
    yield f"| base | {_base_line(base, facts)} |"
    if facts.lora is not None:
        rank, layers = max(facts.lora.ranks.values()), len(facts.lora.ranks)
        yield f"| LoRA | rank {rank}, alpha {facts.lora.alpha:g}, in {layers} layers; merged in float32 |"
    yield f"| check | loaded again; its logits differ from the checkpoint's by at most {facts.difference:.1e}" + (
        f"; rounding changed them by at most {facts.rounding:.1e} |" if facts.rounding is not None else " |"
    )
    metrics = _until(_metrics(model), model.step)
    yield f"| certificate | {_certificate(metrics)} |"
    yield from _curve(metrics)
    yield from _use(model, folder, schemas)
    yield from _data(model)
    yield from _table("Settings", ((path, _without_folder(model.setting(path))) for path in _SETTINGS))
    versions = run.get("versions")
    named = versions.items() if isinstance(versions, Mapping) else ()
    yield from _table("Versions of the run", ((_text(name), number) for name, number in named))
    yield from ("", "The licenses of the base and of the data hold for this model, too; this page does not know them.")


def _without_folder(value: Any) -> Any:
    """Return a setting; of a function in a file without the file's folder."""
    is_place = isinstance(value, str) and is_own_function(value) and ".py:" in value
    return value.rpartition("/")[2] if is_place else value


def _base_line(base: Any, facts: ExportReport) -> str:
    if not isinstance(base, str):
        return "not known"
    name = _text(Path(base).name if Path(base).is_absolute() else base)
    hashed = f"`{facts.base}`" if facts.base else "not at hand when this was written"
    far = "" if facts.from_base is None else f"; this model's logits differ from its by up to {facts.from_base:.2g}"
    return f"{name}, weights {hashed}{far}"


def _metrics(model: Model) -> list[dict[str, Any]]:
    """Return the numbers among the run's metrics."""
    if model.run is None or any(model.named_path(path) is None for path in metric_files(model.run)):
        return []
    return [
        {**entry, "data": {str(key): value for key, value in entry["data"].items() if _is_number(value)}}
        for entry in read_metrics(model.run)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _until(metrics: list[dict[str, Any]], step: int | None) -> list[dict[str, Any]]:
    return [entry for entry in metrics if step is None or entry["step"] <= step]


def _certificate(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the certificate's text about the steps that made this model."""
    rows, tokens, violations, unverified = (
        sum(int(value) for entry in metrics if math.isfinite(value := entry["data"].get(_CERTIFICATE + key) or 0))
        for key in ("rows", "tokens", "violations", "unverified")
    )
    if not rows:
        return "none: no row was verified"
    more = f", {unverified:,} rows not verified" if unverified else ""
    return f"{rows:,} rows and {tokens:,} trained tokens verified, {violations:,} violations{more}"


def _curve(metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of validations, with the mean reward of the steps before each."""
    names = list(dict.fromkeys(key for entry in metrics for key in entry["data"] if _SCORE.fullmatch(key)))
    names = names[:_MOST_SCORES]
    rows: list[tuple[int, list[float], Mapping[str, Any]]] = []
    rewards: list[float] = []
    for number, entry in enumerate(metrics):
        if (reward := entry["data"].get(REWARD)) is not None:
            rewards.append(reward)
        if any(name in entry["data"] for name in names) or number == len(metrics) - 1:
            rows.append((entry["step"], rewards, entry["data"]))
            rewards = []
    if not rows:
        return
    yield from ("", "## Curve", "", "Reward is the mean of the training steps since the row above.", "")
    yield "| step | reward | " + " | ".join(map(_shown_score, names)) + " |"
    yield "|---" * (2 + len(names)) + "|"
    kept = range(len(rows))
    if len(rows) > _MOST_ROWS:
        kept = sorted({round(index * (len(rows) - 1) / (_MOST_ROWS - 1)) for index in range(_MOST_ROWS)})  # type: ignore[assignment]
    for index in kept:
        step, since, data = rows[index]
        cells = ["–" if data.get(name) is None else f"{data[name]:.3f}" for name in names]
        reward = f"{sum(since) / len(since):.3f}" if since else "–"
        yield f"| {step} | {reward} | " + " | ".join(cells) + " |"


def _shown_score(name: str) -> str:
    found = _SCORE.fullmatch(name)
    assert found is not None
    source = _text(found[1])
    return f"{source} {found[2]}" + (f", mean of {_text(found[3])}" if found[3] != "1" else "")


def _use(model: Model, folder: Path, schemas: Sequence[Any] | None) -> Iterator[str]:
    yield from ("", "## Use", "")
    names = [str(schema.get("function", {}).get("name")) for schema in schemas or []]
    if names:
        some = f"{', '.join(map(_code, names[:8]))}{', …' if len(names) > 8 else ''}"
        form = model.setting(f"{_ROLLOUT}.multi_turn.format")
        yield f"`{TOOLS}` has the schemas of its tools ({some}), as the chat template gets them. Calls are written in "\
              f"the format {_code(form)}."  # fmt: skip
        yield ""
    if (folder / GENERATION).is_file() and model.run is not None:
        yield f"`{GENERATION}` samples as training did. A `top_k` of the vocabulary's size leaves no token out."
        yield ""
    given = ', tools=json.load(open(f"{folder}/tools.json"))' if names else ""
    yield from (
        "```python",
        *(["import json"] if names else []),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "…"  # this folder',
        "tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)",
        'messages = [{"role": "user", "content": "…"}]',
        f"inputs = tokenizer.apply_chat_template(messages{given}, add_generation_prompt=True, "
        'return_tensors="pt", return_dict=True)',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=256)[0]))",
        "```",
    )


def _data(model: Model) -> Iterator[str]:
    """Yield the table of the files of rows, with their hashes."""
    rows = []
    for split in ("train_files", "val_files"):
        named = model.setting(f"data.{split}")
        for path in [named] if isinstance(named, str) else named if isinstance(named, list) else []:
            title = f"{split.removesuffix('_files')}: {_text(Path(str(path)).name)}"
            rows.append((title, _digest(model.named_path(str(path)))))
    yield from _table("Data", rows, "blake2b-128 of each file.")


def _digest(path: Path | None) -> str:
    if path is None or not path.is_file():
        return "not at hand when this was written"
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _table(title: str, rows: Any, note: str = "") -> Iterator[str]:
    """Yield a table of names and values; nothing where there are none."""
    shown = [(key, without_secrets(value, key)) for key, value in rows if value is not None]
    if not shown:
        return
    yield from ("", f"## {title}", "", *([note, ""] if note else []), "| | |", "|---|---|")
    for key, value in shown:
        yield f"| {key} | {_code(value)} |"


def _code(value: Any) -> str:
    """Return a value of the run as code, on one line; escaped where it would end the code or the table."""
    text = _line(value)
    return f"`{text}`" if text.strip() and _PLAIN.fullmatch(text) else _text(value)


def _text(value: Any) -> str:
    """Return a text of the run of which Markdown, HTML and YAML read no more than a text on one line."""
    return _MARKS.sub(r"\\\1", html.escape(_line(value), quote=False))


def _line(value: Any) -> str:
    given = str(without_secrets(value))[: 2 * _MOST_CHARACTERS]
    text = "".join(each if each.isprintable() else "\ufffd" for each in given)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
