"""Is each setting of verl read, refused or named?

    python -m benchmarks.silent_settings [--without-run] [--reads FOLDER]

Walked is every setting of the flat files that verl ships, beside the table `verl_keys.tsv`. Each of the settings that
were found to do nothing, or differ from their description, is given to the start-up check, which has to name it. Every
recipe with every variant must pass without a message. Then two steps of the quickstart run with a trace of all reads,
which must agree with the table; `--reads` names the folder of such a trace instead. The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.long.training.recipe_configs import BOX, DATABASES, RECIPES, TINY, cases, composed
from tests.support.config_reads import reads_in, traced
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.verl_bridge.startup import verl_keys

ROOT = Path(__file__).resolve().parents[3]
_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROWS = "{rows}"
_BASE = {
    f"{_MODEL}.path": str(RECIPES / "quickstart" / "model"),
    f"{_ROLLOUT}.name": "sglang_async",
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.multi_turn.enable": True,
    f"{_ROLLOUT}.multi_turn.tool_config_path": str(ROOT / "tool_configs" / "calculator.yaml"),
    f"{_ROLLOUT}.agent.default_agent_loop": "multiturn_agent",
    "trainer.n_gpus_per_node": 1,
    "algorithm.adv_estimator": "grpo",
    f"{_ROLLOUT}.n": 8,
    "ray_kwargs.ray_init.num_cpus": 1024,
}
_CRITIC = {"critic.enable": True, "critic.model.path": _BASE[f"{_MODEL}.path"]}
_MEGATRON = {"model_engine": "megatron"}
_SEVERAL = {
    f"{_ROLLOUT}.custom.multiturn.context.mode": "window",
    "algorithm.adv_estimator": "mt_grpo",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": 4,
}
_TAUGHT = {"distillation.enabled": True, "distillation.distillation_loss.use_task_rewards": False}
_APART = {
    "trainer.v1.trainer_mode": "separate_async",
    f"{_ROLLOUT}.nnodes": 1,
    f"{_ROLLOUT}.n_gpus_per_node": 1,
    f"{_ROLLOUT}.checkpoint_engine.backend": "nccl",
}

Case = tuple[str, Any, dict[str, Any]]
FOUND: list[Case] = [
    # They change the training.
    (f"{_ACTOR}.clip_ratio", 0.3, {}),
    (f"{_ACTOR}.grad_clip", 0.5, {}),
    ("critic.grad_clip", 0.5, _CRITIC),
    (f"{_ACTOR}.freeze_vision_tower", True, {}),
    ("algorithm.use_pf_ppo", True, {}),
    ("algorithm.pf_ppo.reweight_method", "max_min", {}),
    ("algorithm.pf_ppo.weight_pow", 3.0, {}),
    ("data.reward_fn_key", "source", {}),
    (f"{_ROLLOUT}.val_kwargs.do_sample", True, {}),
    (f"{_ROLLOUT}.do_sample", False, {}),
    (f"{_ROLLOUT}.repetition_penalty", 1.1, {}),
    (f"{_ROLLOUT}.ignore_eos", True, {}),
    (f"{_ACTOR}.calculate_sum_pi_squared", True, {}),
    (f"{_MODEL}.lora.rank", 16, {}),
    (f"{_MODEL}.lora_rank", 16, _MEGATRON),
    (f"{_MODEL}.lora_rank", 16, _APART),
    (f"{_ROLLOUT}.custom.multiturn.context.weight", "conversation", {**_SEVERAL, **_TAUGHT}),
    (f"{_ROLLOUT}.temperature", 0.7, _TAUGHT),
    # `algorithm.filter_groups.metric` was one, too: of several rows verl's filter compares rows, ours conversations.
    ("critic.ppo_max_token_len_per_gpu", 1000, {**_CRITIC, "critic.use_dynamic_bsz": True}),
    ("critic.forward_max_token_len_per_gpu", 1000, {**_CRITIC, "critic.use_dynamic_bsz": True}),
    ("trainer.balance_batch", False, {}),
    # They change speed, memory or safety.
    (f"{_ROLLOUT}.enable_prefix_caching", False, {}),
    (f"{_ROLLOUT}.enable_chunked_prefill", False, {}),
    (f"{_ROLLOUT}.max_num_batched_tokens", 4096, {}),
    (f"{_ROLLOUT}.cudagraph_capture_sizes", [1, 2], {}),
    (f"{_ROLLOUT}.scheduling_policy", "priority", {}),
    (f"{_ROLLOUT}.seed", 1, {}),
    (f"{_ROLLOUT}.full_determinism", True, {}),
    (f"{_ROLLOUT}.logprobs_mode", "raw_logprobs", {}),
    (f"{_ROLLOUT}.limit_images", 2, {}),
    (f"{_ROLLOUT}.quantization_config_file", "q.json", {}),
    (f"{_ROLLOUT}.multi_stage_wake_up", True, {}),
    (f"{_ROLLOUT}.standalone_gpu_memory_utilization", 0.7, {}),
    (f"{_ROLLOUT}.enable_sleep_mode", False, {}),
    (f"{_ROLLOUT}.sglang_engine_mode", "server", {}),
    (f"{_ROLLOUT}.layer_name_map", {"a": "b"}, {}),
    (f"{_ROLLOUT}.server", {"timeout": 10.0}, {}),
    (f"{_ROLLOUT}.agent.custom_async_server.path", "server.py", {}),
    (f"{_ROLLOUT}.agent.custom_async_server.name", "Server", {}),
    (f"{_ACTOR}.use_torch_compile", False, {}),
    (f"{_ACTOR}.use_fused_kernels", True, {}),
    (f"{_ACTOR}.use_remove_padding", False, {}),
    (f"{_ACTOR}.use_prefix_grouper", True, {}),
    ("actor_rollout_ref.nccl_timeout", 1200, {}),
    ("data.return_raw_chat", False, {}),
    ("data.return_full_prompt", True, {}),
    ("data.return_raw_input_ids", True, {}),
    ("data.truncation", "left", {}),
    ("data.tokenizer", "some/tokenizer", {}),
    (f"{_ACTOR}.checkpoint.strict", False, {}),
    ("trainer.esi_redundant_time", 60, {}),
    ("trainer.ray_wait_register_center_timeout", 600, {}),
    ("algorithm.filter_groups.max_num_gen_batches", 4, {"algorithm.filter_groups.enable": True}),
    # They contradict settings of ours.
    (f"{_ROLLOUT}.calculate_log_probs", False, {}),
    ("trainer.v1.sampler.custom_sampler.name", "Mine", {
        "trainer.v1.trainer_mode": "colocate_async", "trainer.v1.sampler.custom_sampler.path": "mine.py",
        f"{_ROLLOUT}.custom.multiturn.max_staleness": 1,
    }),
    (f"{_ROLLOUT}.name", "sglang_async", {"data.train_files": _ROWS, "data.val_files": _ROWS}),
]  # fmt: skip
"""Each setting that was found, a value other than the default, and settings that it needs beside it.

The last is `agent.default_agent_loop`, against which a column of the rows names another loop: the message names
`rollout.name`. `rollout.trace` is not among them, since it works with our agent loop.
"""


def settings_of_verl(overrides: dict[str, Any]) -> Any:
    """Return verl's configuration with some settings changed."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf, open_dict

    engine = overrides.get("model_engine", "dp")
    if engine not in _composed:
        with initialize_config_module("verl.trainer.config", version_base=None):
            _composed[engine] = compose("ppo_trainer", overrides=[f"model_engine={engine}"])
    config = copy.deepcopy(_composed[engine])
    with open_dict(config):
        for key, value in {**_BASE, **overrides}.items():
            OmegaConf.update(config, key, value, force_add=True)
    return config


_composed: dict[str, Any] = {}


def said_of(config: Any) -> str:
    """Return the start-up check's messages about a configuration: its refusal and its warnings."""
    from verl_multiturn.errors import ConfigError
    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            prepare_config(config)
        except ConfigError as error:
            print(error, file=told)
    return told.getvalue()


def unnamed(rows: str) -> Iterator[str]:
    """Yield the settings that the start-up check does not name.

    Args:
        rows: A data file whose column `agent_name` names an agent loop of verl's.
    """
    for key, value, beside in FOUND:
        given = {name: rows if text == _ROWS else text for name, text in beside.items()}
        if f"{key}=" not in said_of(settings_of_verl({**given, key: value})):
            yield key


def recipes_with_a_message(short: bool) -> Iterator[str]:
    """Yield the recipes, with their variants, with settings that the start-up check calls silent."""
    tiny = [(name, variants) for name in sorted(TINY) for variants in [[], *_variants_of(name)]]
    for recipe, variants in [*cases(short), *tiny]:
        config = composed(recipe, variants, BOX[0])
        if message := silent_of(config):
            yield f"{'+'.join([recipe, *variants])}: {message}"
    for recipe in sorted(path.parent.name for path in RECIPES.glob("*/config.yaml")):
        if message := silent_of(compose_run(plan_run(recipe, smoke=True))):
            yield f"{recipe} --smoke: {message}"


def silent_of(config: Any) -> str:
    """Return the messages about a configuration's silent settings; empty when there are none."""
    from verl_multiturn.verl_bridge.startup.refusals.silent_settings import SILENT, applies
    from verl_multiturn.verl_bridge.startup.table import RefusalRow
    from verl_multiturn.verl_bridge.startup.view import RunView

    if "use_v1" not in config.trainer:
        return ""  # a trainer for SFT, whose settings the start-up check does not look at
    run = RunView(config)
    rows = [row for row in SILENT if isinstance(row, RefusalRow)] if applies(run) else []
    return "; ".join(filter(None, (row.message(run) for row in rows)))


def _variants_of(recipe: str) -> list[list[str]]:
    return [[path.stem] for path in sorted((RECIPES / recipe / "variant").glob("*.yaml"))]


def traced_run(folder: Path) -> list[tuple[str, str]]:
    """Run two steps of the quickstart, and return which settings were read by which files."""
    reads = folder / "reads"
    reads.mkdir()
    command = [sys.executable, "-m", "verl_multiturn.cli", "run", "quickstart", "--smoke", f"--out={folder / 'run'}"]
    environment = {**os.environ, **traced(reads), "VERL_PLATFORM": "cpu"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    return reads_in(reads)


def run(short: bool, read: Callable[[Path], list[tuple[str, str]]]) -> dict[str, Any]:
    """Print errors, and return the figures.

    Args:
        short: The shared variants on top of one recipe alone.
        read: Takes an empty folder, and returns the reads of a traced run; none where none was traced.
    """
    faults = verl_keys.faults()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        for needed in DATABASES:
            Path(needed).mkdir(parents=True)
        silent = list(unnamed(_rows_of_another_loop(folder)))
        told = list(recipes_with_a_message(short))
        reads = read(folder)
    wrong = faults + (verl_keys.trace_faults(reads) if reads else [])
    for line in [*wrong, *(f"{key}: the start-up check does not name it" for key in silent), *told]:
        print(line)
    return {
        "keys": len(verl_keys.all_keys()),
        "keys_of_each_file": {engine: len(verl_keys.defaults(engine)) for engine in verl_keys.ENGINES},
        "without_entry": len(verl_keys.without_entry()),
        "wrong": len(wrong),
        "traced": len({setting for setting, _ in reads}) or "not run",
        "found": len(FOUND),
        "named": len(FOUND) - len(silent),
        "not_named": silent,
        "recipes_with_a_message": len(told),
    }


def holds(summary: Mapping[str, Any]) -> bool:
    """Return whether nothing is wrong, unnamed or named in vain."""
    return not (summary["wrong"] or summary["not_named"] or summary["recipes_with_a_message"])


def _rows_of_another_loop(folder: Path) -> str:
    import pandas as pd

    rows = folder / "rows.parquet"
    prompt = [{"role": "user", "content": "What is 1 + 1?"}]
    pd.DataFrame([{"prompt": prompt, "agent_name": "tool_agent"}]).to_parquet(rows)
    return str(rows)
