"""Reading of verl's whole configuration, for the start-up check and for everything that runs later.

Nothing here refuses two settings that do not fit together: `startup/` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf

from verl_multiturn.config import PATH, MultiTurnSettings, read_settings
from verl_multiturn.errors import ConfigError
from verl_multiturn.old_names import name_of_today
from verl_multiturn.verl_bridge.names import (
    MANAGER,
    NUMBERED_ROWS,
    OUR_LOOPS,
    PROXY_LOOP,
    RECORDED_LOOP,
    ROLLOUT,
    ROW_LOSS,
    SGLANG,
    TURN_LOSS,
)

_MODEL = "actor_rollout_ref.model"

OWN_SERVER = f"{PATH}.derived.own_server"
"""State of the start-up check: whether the servers of verl's rollout name are ours."""

ADAPTER_RANKS = (f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank")
"""verl's settings of an adapter's rank: FSDP reads the first, Megatron the second."""


PROPORTIONAL = ("vanilla", "dppo_tv", "dppo_kl", ROW_LOSS, TURN_LOSS, "sapo", "gpg", "cispo")
"""Policy losses, verl's and ours, in which each token's loss is its advantage times something that other rows do not
change."""
OF_ROWS = (*PROPORTIONAL, "dro", "bypass_mode")
"""Policy losses, verl's and ours, in which a row's loss does not depend on the others of its micro-batch. verl's
further ones average over a micro-batch, or choose tokens among its own; those of a user's own are unknown."""


def only_our_loop(config: DictConfig) -> bool:
    """Return whether every row that is trained on is known to come from an agent loop of ours."""
    loops, known = agent_loops(config, ("train_files",))
    return known and loops <= OUR_LOOPS


def agent_loops(config: DictConfig, files: Sequence[str] = ("train_files", "val_files")) -> tuple[set[str], bool]:
    """Return the agent loops that this run uses, and whether they are known for sure.

    A row's loop is its `agent_name`; without that column the default loop. A data set class of the user's own, a
    folder, a JSON or JSONL file and a remote file are not looked into; the loops are then not known for sure.
    """
    agent = config.actor_rollout_ref.rollout.agent
    default = agent.default_agent_loop
    loops: set[str] = set()
    known = name_of_today(OmegaConf.select(config, "data.custom_cls.path") or "") in ("", NUMBERED_ROWS[0])
    for key in files:
        listed = OmegaConf.select(config, f"data.{key}")
        for file in [listed] if isinstance(listed, str) else list(listed or []):
            names = _agent_names(str(file))
            known = known and names is not None
            loops |= names or {default}
    return loops or {default}, known


def own_loops(agent: DictConfig) -> bool:
    """Return whether the run has agent loops of the user's own."""
    return bool(agent.agent_loop_config_path) or own_manager(agent) is not None


def own_manager(agent: DictConfig) -> str | None:
    """Return the agent-loop manager of the user's own; None when verl's or ours runs."""
    manager: str = agent.get("agent_loop_manager_class") or ""
    return None if name_of_today(manager) in ("", MANAGER) else manager


def _agent_names(file: str) -> set[str] | None:
    """Return the agent names in a data file; empty without that column, None when the file is not looked into."""
    path = Path(file).expanduser()
    if "://" in file or path.is_dir() or path.suffix in (".json", ".jsonl"):
        return None
    if path.suffix != ".parquet" or not path.is_file():
        return set()
    if "agent_name" not in pyarrow.parquet.read_schema(path).names:
        return set()
    return set(pyarrow.parquet.read_table(path, columns=["agent_name"])["agent_name"].to_pylist())


def is_our_reward(config: DictConfig, section: str = "reward.custom_reward_function") -> bool:
    """Return whether the run's reward function is `verl_multiturn.rewards.compute_score`.

    Args:
        config: verl's whole configuration.
        section: The section that names the function; verl takes an older one, too.
    """
    path = str(OmegaConf.select(config, f"{section}.path") or "")
    is_here = path.startswith("pkg://verl_multiturn.") or "/verl_multiturn/rewards/" in path
    return is_here and OmegaConf.select(config, f"{section}.name") == "compute_score"


def has_rubric(config: DictConfig) -> bool:
    """Return whether the run's reward function is ours, and its reward `rubric` has a judge.

    Args:
        config: verl's whole configuration, or a part of it.
    """
    url = OmegaConf.select(config, "reward.custom_reward_function.reward_kwargs.rubric.url")
    return url is not None and is_our_reward(config)


def estimator_of(config: DictConfig) -> str:
    """Return the name of the configured estimator of advantages."""
    return str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator))


def divides_by_deviation(config: DictConfig) -> bool:
    """Return whether verl's `grpo` and our `mt_grpo` divide by the standard deviation."""
    return bool(config.algorithm.get("norm_adv_by_std_in_grpo", True))


def settings_of(rollout: Any) -> MultiTurnSettings:
    """Read our settings from the section `custom.multiturn` of a rollout configuration.

    Args:
        rollout: `actor_rollout_ref.rollout`, as OmegaConf's object or as verl's dataclass.

    Raises:
        ConfigError: An unknown key, or a value that does not fit.
    """
    custom = rollout.get("custom")
    if not isinstance(custom, Mapping | None):
        raise ConfigError(f"rollout.custom: expected a mapping, got {custom!r}; write our settings under {PATH}")
    raw = None if custom is None else custom.get("multiturn")
    plain: Any = OmegaConf.to_container(raw, resolve=True) if OmegaConf.is_config(raw) else raw
    return read_settings(plain)


def runs_our_server(rollout: Any) -> bool:
    """Return whether the servers of a rollout are ours, in every process, before the start-up check as after it.

    Ours end a pause at once, report the weights that sampled each token, and stop single generations. With
    disaggregated prefill and decoding verl makes its own servers, whatever the name.

    Args:
        rollout: A rollout configuration, as OmegaConf's object or as verl's dataclass.
    """
    if is_disaggregated(rollout):
        return False
    name = rollout.get("name")
    return bool(name == ROLLOUT or (name == SGLANG and own_server(rollout)))


def is_disaggregated(rollout: Any) -> bool:
    """Return whether servers of a rollout either read prompts or sample, each on devices of its own."""
    return bool((rollout.get("disaggregation") or {}).get("enabled"))


def own_server(rollout: Any) -> Any:
    """Return the value of `OWN_SERVER` in a rollout configuration; None where it is not set."""
    found = rollout
    for key in OWN_SERVER.split(".")[2:]:
        found = found.get(key) if found is rollout or isinstance(found, Mapping) else None
    return found


def may_have_several_rows(config: DictConfig, settings: MultiTurnSettings) -> bool:
    """Return whether a conversation or a session of the run may become several rows of a batch.

    A recorded one has the rows of the run that recorded it, whatever this run's settings are.

    Args:
        config: verl's whole configuration.
        settings: Our settings in it.
    """
    if settings.context.mode != "append" or settings.trains_user:
        return True
    loops, _ = agent_loops(config, ("train_files",))
    return RECORDED_LOOP in loops or (settings.proxy.max_rows > 1 and PROXY_LOOP in loops)


def teacher_devices(config: DictConfig) -> int:
    """Return how many devices the teachers of a run have, all together; 0 without distillation.

    Args:
        config: verl's whole configuration.
    """
    section = config.get("distillation") or {}
    return int(section["n_gpus_per_node"] * section["nnodes"]) if section.get("enabled") else 0


def wall_clock_s(settings: MultiTurnSettings) -> float:
    """Return the seconds that a session may take.

    Raises:
        ConfigError: There is no limit.
    """
    if settings.request_timeout_s is None:
        raise ConfigError(
            f"{PATH}.request_timeout_s=null with the agent loop {PROXY_LOOP}: an agent that hangs would never end; set "
            "the seconds that a whole session may take, such as 600"
        )
    return settings.request_timeout_s


def adapter_rank(config: DictConfig) -> tuple[str, int]:
    """Return the key and the rank of adapters that the engine would serve; rank 0 without any or with merged ones."""
    if not OmegaConf.select(config, f"{_MODEL}.lora.merge"):
        for key in ADAPTER_RANKS:
            rank = OmegaConf.select(config, key)
            if isinstance(rank, int) and rank > 0:  # verl itself refuses other values
                return key, rank
    return "", 0


def cluster_address(address: str | None) -> str | None:
    """Return the address of the cluster that `ray.init(address)` joins; None when it starts a Ray of its own.

    Where `address` is None or "auto", Ray reads the environment variable RAY_ADDRESS. A `ray://` address, from that
    variable or from `address`, is returned unchanged.
    """
    from ray._private.services import canonicalize_bootstrap_address

    asked = os.environ.get("RAY_ADDRESS") or address if address in (None, "auto") else address
    if asked and asked.startswith("ray://"):
        return asked
    found: str | None = canonicalize_bootstrap_address(address)
    return found


def why_rows_stay(config: DictConfig) -> str | None:
    """Return the setting that makes a row with advantages of 0 matter to the update, with its value; None: none does.

    Args:
        config: verl's whole configuration.
    """
    actor = config.actor_rollout_ref.actor
    loss_mode = (actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
    mode = actor.get("loss_agg_mode", "token-mean")
    several = config.data.get("train_batch_size", 0) > actor.ppo_mini_batch_size
    cases = {
        "actor.use_kl_loss=True": actor.get("use_kl_loss", False),
        f"actor.entropy_coeff={actor.get('entropy_coeff', 0)}": actor.get("entropy_coeff", 0),
        f"actor.policy_loss.loss_mode={loss_mode}": loss_mode not in PROPORTIONAL,
        # Without a factor verl divides by the length of the longest row of a micro-batch.
        f"actor.loss_agg_mode={mode} without actor.loss_scale_factor": (
            mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None
        ),
        # The workers draw then which rows an update takes.
        "actor.shuffle=True": actor.get("shuffle", False) and several,
        "distillation.enabled=True": (config.get("distillation") or {}).get("enabled", False),
        # It learns to predict every row's tokens, whatever their advantages are.
        "model.mtp.enable_train=True": OmegaConf.select(config, f"{_MODEL}.mtp.enable_train"),
    }
    return next((f"actor_rollout_ref.{name}" if name.startswith(("actor", "model")) else name
                 for name, is_so in cases.items() if is_so), None)  # fmt: skip
