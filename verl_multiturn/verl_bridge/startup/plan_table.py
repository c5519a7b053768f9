"""Numbers of a planned run: the table of `verl-multiturn run NAME --check`.

The memory of a GPU is estimated; docs/train/sizing.md has the formula and its gaps.

Invariants:
- verl is not imported, no model is loaded: parameters are counted in the headers of its files.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.describe import type_name
from verl_multiturn.interactions.old_verl.classes import AdaptedInteraction
from verl_multiturn.proxy.opponents.draw import shown
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.verl_bridge.names import OUR_LOOPS, PROXY_LOOP
from verl_multiturn.verl_bridge.settings import ADAPTER_RANKS, is_our_reward
from verl_multiturn.verl_bridge.startup.ray_cpus import required_ray_cpus
from verl_multiturn.verl_bridge.startup.refusals.data_rows import is_elsewhere, rows_of
from verl_multiturn.verl_bridge.startup.view import RunView

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_FUNCTION = "custom_reward_function"
_GIB = 1024**3
_ROW_LIMIT = "no limit"
_LARGEST_HEADER = 100_000_000
_MOST_NAMES = 16


def model_folder(name: str) -> Path | None:
    """Return the folder of a model that is on this machine, in Hugging Face's cache too; None for another."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}" / "snapshots"
    return next((found for found in sorted(cache.glob("*")) if (found / "config.json").is_file()), None)


def parameters_of(folder: Path) -> int | None:
    """Return the number of a model's parameters, from the headers of its safetensors files; None without any."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        return sum(map(_parameters_in, files)) if files else None
    except (OSError, ValueError, KeyError, struct.error):
        return None  # a truncated file


def _parameters_in(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LARGEST_HEADER:
            raise ValueError(length)
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


_USES = {
    "none": "none (these rewards are only reported)",
    "add": "add (to the reward)",
    "replace": "replace (the reward)",
}
"""Words for the modes of rewards from outside the reward function."""


def facts_of(run: RunView) -> dict[str, Any]:
    """Return the facts of a run, by name, for the table and the JSON line; null for those that are not known here.

    Args:
        run: A view of the configuration, which all checks have accepted.
    """
    devices = int(run.value("trainer.nnodes")) * int(run.value("trainer.n_gpus_per_node"))
    apart = int(run.value(f"{_ROLLOUT}.nnodes") or 0) * int(run.value(f"{_ROLLOUT}.n_gpus_per_node") or 0)
    facts: dict[str, Any] = {
        "model": run.value(f"{_MODEL}.path"),
        "parameters": None,
        "device": run.value("trainer.device"),
        "gpus": devices,
        "gpus_of_engines_apart": apart if run.our_trainer == "separate_async" else 0,
        "strategy": run.value(f"{_ACTOR}.strategy"),
        "tensor_parallel": run.value(f"{_ROLLOUT}.tensor_model_parallel_size"),
        "sequence_parallel": _sequence_parallel(run),
        "trainer_mode": str(run.trainer_mode).removeprefix("multiturn_"),
        "agent_loops": sorted(map(str, run.loops)),
        "batch": run.value("data.train_batch_size"),
        "n": run.value(f"{_ROLLOUT}.n"),
        "mini_batch": run.value(f"{_ACTOR}.ppo_mini_batch_size"),
        "micro_batch": run.value(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
        "micro_batch_tokens": _dynamic_tokens(run),
        "prompt_length": run.value("data.max_prompt_length"),
        "response_length": run.value("data.max_response_length"),
        "turns": run.multi_turn.max_assistant_turns,
        **_objects(run),
        "rows": rows_of(run, "data.train_files"),
        "validation_rows": rows_of(run, "data.val_files"),
        "rows_elsewhere": is_elsewhere(run, "data.train_files"),
        "filter_overlong_prompts": bool(run.value("data.filter_overlong_prompts")),
        "steps": None,
        "steps_from_rows": run.value("trainer.total_training_steps") is None,
        "lr": run.value(f"{_ACTOR}.optim.lr"),
        "estimator": run.estimator,
        "advantage_options": dict(run.settings.advantage.options),
        **_rewards(run),
        **_roles(run),
        "kl": _kl(run),
        "loss_agg_mode": run.value(f"{_ACTOR}.loss_agg_mode"),
        "context": run.settings.context.mode,
        "context_weight": run.settings.context.weight,
        **_losses(run),
        "lora_rank": next((rank for rank in map(run.value, ADAPTER_RANKS) if rank), 0),
        "cluster": run.cluster,
        "ray_cpus": sum(required_ray_cpus(run.config).values()) if run.is_v1 else None,
    }
    facts["steps"] = _steps(run, facts["rows"])
    return facts | _sizes(run, facts, devices)


def _objects(run: RunView) -> dict[str, Any]:
    """Return the files of the tools and interactions, the tools' names, and the interactions' classes by name.

    Without files of a kind the names are empty. They are null in an early view, since that runs no code of the user's.
    """
    tools, functions = run.tool_files
    interactions = run.settings.interaction_config_path
    loaded = {} if run.is_early else run.interactions
    classes = {
        name: type_name(each.old if isinstance(each, AdaptedInteraction) else each) for name, each in loaded.items()
    }
    has_names = not run.is_early
    return {
        "tool_config_path": tools,
        "function_tool_path": functions,
        "tools": (list(run.tools) if has_names else None) if tools or functions else [],
        "interaction_config_path": interactions,
        "interactions": classes if has_names or interactions is None else None,
    }


def _rewards(run: RunView) -> dict[str, Any]:
    """Return the reward function, null for verl's own, its options and routes, and the uses of other rewards."""
    older = run.value(_FUNCTION) or {}
    section = _FUNCTION if any(each is not None for each in older.values()) else f"reward.{_FUNCTION}"
    path, options = run.value(f"{section}.path"), run.value(f"{section}.reward_kwargs") or {}
    function = f"{path}:{run.value(f'{section}.name')}" if path else None
    routes = (options.get("routes") or {}) if is_our_reward(run.config, section) else {}
    ours = run.settings
    return {
        "reward_function": function,
        "reward_options": sorted(map(str, options)),
        "reward_routes": {str(pattern): str(name) for pattern, name in routes.items()},
        "tool_reward": ours.tool_reward.mode,
        "interaction_reward": None if ours.interaction_config_path is None else ours.interaction_reward.mode,
    }


def _roles(run: RunView) -> dict[str, Any]:
    """Return the roles of a run, those that are trained, and the opponents of an agent's; null without roles."""
    if run.settings.trains_user:
        both = list(run.settings.trained_roles or ())
        return {"roles": both, "trained_roles": both, "opponents": {}}
    proxy = run.settings.proxy
    roles = Roles.of(proxy) if PROXY_LOOP in run.loops else None
    if roles is None:
        return {"roles": None, "trained_roles": None, "opponents": None}
    opponents = {role: list(map(shown, listed)) for role, listed in proxy.opponents.items()}
    return {"roles": list(roles.names), "trained_roles": list(roles.trained), "opponents": opponents}


def _losses(run: RunView) -> dict[str, Any]:
    """Return the loss of a distillation, the models of its teachers and the policy loss; null where there is none."""
    policy = run.value(f"{_ACTOR}.policy_loss.loss_mode")
    if not run.value("distillation.enabled"):
        return {"policy_loss": policy, "distillation_loss": None, "teachers": []}
    loss = run.value("distillation.distillation_loss")
    return {
        "policy_loss": policy if loss.use_task_rewards else None,  # verl then leaves it out
        "distillation_loss": loss.loss_mode,
        "teachers": list(run.teachers.values()),
    }


def _sequence_parallel(run: RunView) -> int:
    sizes = [run.value(f"{_ACTOR}.{name}") for name in ("ulysses_sequence_parallel_size",)]
    sizes.append(run.value(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"))
    return max(size or 1 for size in sizes)


def _dynamic_tokens(run: RunView) -> int | None:
    """Return the most tokens of a micro-batch of one GPU; None where micro-batches count rows."""
    tokens = run.value(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    return int(tokens) if run.value(f"{_ACTOR}.use_dynamic_bsz") and tokens else None


def _kl(run: RunView) -> str:
    if run.value(f"{_ACTOR}.use_kl_loss"):
        return f"in the loss, {run.value(f'{_ACTOR}.kl_loss_coef')}"
    if run.value("algorithm.use_kl_in_reward"):
        return f"in the reward, {run.value('algorithm.kl_ctrl.kl_coef')}"
    return "none"


def _steps(run: RunView, rows: int | None) -> int | None:
    if (steps := run.value("trainer.total_training_steps")) is not None:
        return int(steps)
    return (
        None
        if rows is None
        else rows // int(run.value("data.train_batch_size")) * int(run.value("trainer.total_epochs"))
    )


def _sizes(run: RunView, facts: dict[str, Any], devices: int) -> dict[str, Any]:
    """Return parameters, disk of a checkpoint and memory of a GPU, in GiB."""
    sizes: dict[str, Any] = dict.fromkeys(("parameters", "checkpoint_gib", "trainer_gib", "engine_gib"))
    folder = model_folder(str(facts["model"]))
    count = None if folder is None else parameters_of(folder)
    if folder is None or count is None:
        return sizes
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config  # of a model for images
    sizes |= {"parameters": count, "checkpoint_gib": round(count * 12 / _GIB, 2)}
    sizes["engine_gib"] = round(count * 2 / facts["tensor_parallel"] / _GIB, 2)
    is_whole, section = not facts["lora_rank"], run.value(f"{_ACTOR}.fsdp_config") or {}
    each = 0 if section.get("param_offload") else 4  # bytes of a parameter in float32
    if is_whole:
        each += 4 + (0 if section.get("optimizer_offload") else 8)  # its gradient, and Adam's two moments
    if is_whole and run.has_reference and not run.value("actor_rollout_ref.ref.fsdp_config.param_offload"):
        each += 4
    micro = facts["micro_batch_tokens"] or (facts["micro_batch"] or 1) * run.longest_row // facts["sequence_parallel"]
    hidden, layers, words = (config.get(key) or 0 for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    kept = layers if run.value(f"{_MODEL}.enable_gradient_checkpointing") else 17 * layers
    activations = 2 * micro * hidden * kept
    sizes["trainer_gib"] = round((count * each / devices + activations + 6 * micro * words) / _GIB, 2)
    return sizes


def _given(options: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{name}={value}' for name, value in options.items())})" if options else ""


def _lines_of_objects(facts: dict[str, Any]) -> dict[str, str]:
    """Return the table's lines about tools and interactions; none where the run has none."""
    lines: dict[str, str] = {}
    if files := [facts[key] for key in ("tool_config_path", "function_tool_path") if facts[key]]:
        lines["tools"] = f"{', '.join(files)}: {_listed(facts['tools'])}"
    if facts["interaction_config_path"]:
        classes = facts["interactions"]
        named = None if classes is None else [f"{name} ({kind})" for name, kind in classes.items()]
        lines["interaction"] = f"{facts['interaction_config_path']}: {_listed(named)}"
    return lines


def _listed(names: list[str] | None) -> str:
    if names is None:
        return "not known from here"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"


def _lines_of_roles(facts: dict[str, Any]) -> dict[str, str]:
    """Return the table's lines about roles; none without roles."""
    if not facts["roles"]:
        return {}
    trained = facts["trained_roles"]
    lines = {"roles": ", ".join(role if role in trained else f"{role} (not trained)" for role in facts["roles"])}
    for role, listed in facts["opponents"].items():
        lines[f"opponents of {role}"] = ", ".join(listed)
    return lines


def _lines_of_losses(facts: dict[str, Any]) -> dict[str, str]:
    """Return the table's lines about the policy loss, and about windows and teachers where there are any."""
    policy = facts["policy_loss"] or "none (distillation without task rewards)"
    lines = {"policy loss": f"{policy}, {facts['loss_agg_mode']}"}
    if facts["context"] != "append":
        lines["context"] = f"{facts['context']}, weight of a row: {facts['context_weight']}"
    if facts["distillation_loss"] is not None:
        lines["distillation"] = f"{facts['distillation_loss']}, from {', '.join(facts['teachers'])}"
    return lines


def lines_of(facts: dict[str, Any]) -> dict[str, str]:
    """Return the lines of the table, by their titles.

    Args:
        facts: The result of `facts_of`.
    """

    def known(value: Any, end: str = "") -> str:
        if value is None:
            return "not known from here"
        return f"{value:,}{end}" if isinstance(value, int) else f"{value}{end}"

    devices = "GPUs" if facts["device"] != "cpu" else "devices (CPU)"
    apart = f", and {facts['gpus_of_engines_apart']} for engines apart" if facts["gpus_of_engines_apart"] else ""
    micro = facts["micro_batch_tokens"]
    rows = [known(facts[key]) for key in ("rows", "validation_rows")]
    is_filtered = facts["filter_overlong_prompts"] and facts["rows"] is not None
    most = "at most " if is_filtered and facts["steps_from_rows"] else ""
    turns = facts["turns"] or _ROW_LIMIT
    conversations = (facts["batch"] or 0) * (facts["n"] or 1)
    lora = f", LoRA of rank {facts['lora_rank']}" if facts["lora_rank"] else ""
    later = {
        "the rows, which are not made yet (--prepare --check makes them)": facts["rows"] is None
        and not facts["rows_elsewhere"],
        "the rows, which are elsewhere or which a data set class of your own reads": facts["rows_elsewhere"],
        "the number of rows that verl leaves out for their long prompts (data.filter_overlong_prompts)": is_filtered,
        "the model's files, which are not on this machine": facts["parameters"] is None,
        f"the logical CPUs of Ray's cluster at {facts['cluster']}": facts["cluster"] is not None,
        "the GPUs, what is built for them (`verl-multiturn doctor --gpu`) and, where none is here, the logical CPUs": (
            facts["device"] != "cpu"
        ),
    }
    ours = "" if set(facts["agent_loops"]) & OUR_LOOPS else " (verl's own loop)"
    return {
        "model": f"{facts['model']}, {known(facts['parameters'], ' parameters')}{lora}",
        devices: f"{facts['gpus']}{apart}; engine: tensor parallel {facts['tensor_parallel']}; trainer: "
        f"{facts['strategy']}, sequence parallel {facts['sequence_parallel']}",
        "trainer": f"{facts['trainer_mode']}, {', '.join(facts['agent_loops'])}{ours}",
        "batch": f"{facts['batch']} prompts × {facts['n']} = {conversations} conversations a step",
        "mini-batch, micro-batch": f"{facts['mini_batch']} prompts, "
        + (f"{micro:,} tokens a GPU" if micro else f"{facts['micro_batch']} rows a GPU"),
        "tokens": f"prompt {facts['prompt_length']:,}, response {facts['response_length']:,}",
        "turns": str(turns),
        **_lines_of_objects(facts),
        "rows": f"training {rows[0]}, validation {rows[1]}"
        + (", before verl leaves out prompts that are too long" if is_filtered else ""),
        "steps": f"{most}{known(facts['steps'])}",
        "learning rate": known(facts["lr"]),
        "estimator, KL": f"{facts['estimator']}{_given(facts['advantage_options'])}, {facts['kl']}",
        **_lines_of_losses(facts),
        "reward": (facts["reward_function"] or "verl's own, by data_source")
        + (f" ({', '.join(facts['reward_options'])})" if facts["reward_options"] else "")
        + "".join(f"; {pattern}: {name}" for pattern, name in facts["reward_routes"].items()),
        **{f"{key}.mode": _USES[facts[key]] for key in ("tool_reward", "interaction_reward") if facts[key] is not None},
        **_lines_of_roles(facts),
        "disk of a checkpoint": known(facts["checkpoint_gib"], " GiB"),
        "logical CPUs in Ray": known(facts["ray_cpus"]),
        "memory of a GPU (estimate)": "none, on a CPU"
        if facts["device"] == "cpu"
        else f"trainer {known(facts['trainer_gib'], ' GiB')}, engine's weights {known(facts['engine_gib'], ' GiB')}",
        "left to the start": "; ".join(text for text, is_so in later.items() if is_so) or "nothing more",
    }
