"""A wrong setting ends the trainer's command before Ray or an engine starts, with one clear error and status not 0."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.stack

ROLLOUT = "actor_rollout_ref.rollout"
RIGHT = {
    "actor_rollout_ref.model.path": str(ROOT / "recipes" / "quickstart" / "model"),
    f"{ROLLOUT}.name": "sglang_async",
    f"{ROLLOUT}.multi_turn.enable": "True",
    f"{ROLLOUT}.multi_turn.tool_config_path": str(ROOT / "tool_configs" / "calculator.yaml"),
    f"{ROLLOUT}.agent.default_agent_loop": "multiturn_agent",
    "trainer.n_gpus_per_node": "1",
}


def run(tmp_path: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    settings = {**RIGHT, "hydra.run.dir": str(tmp_path / "hydra"), **changes}
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        cwd=tmp_path,
    )


def bad_yaml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    return str(path)


UNRESOLVED = "tools: [{class_name: nowhere.Tool}]"
NO_SCHEMA = """
tools:
  - class_name: verl_multiturn.tools.calculator.CalculatorTool
    tool_schema: {type: function, function: {name: f, parameters: {type: objekt}}}
"""
NO_NAME = """
tools:
  - class_name: verl_multiturn.tools.calculator.CalculatorTool
    tool_schema: {type: function, function: {name: f, parameters: {type: object, properties: {
      expression: {type: string, enum: [<tool_call>]}}}}}
"""


def test_the_command_ends_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, **{f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent"})
    assert done.returncode == 2, done.stderr[-2000:]
    assert "'single_turn_agent' never calls a tool" in done.stderr
    assert done.stderr.count("verl-multiturn: ") == 1
    assert "Traceback" not in done.stderr
    assert "ray init kwargs" not in done.stdout


def composed(**changes: str) -> Any:
    """Compose verl's configuration with changes, in this process."""
    from tests.trainer_config import compose_config

    return compose_config([f"{key}={value}" for key, value in {**RIGHT, **changes}.items()])


@pytest.mark.parametrize(
    ("changes", "yaml_text", "message"),
    [
        ({f"{ROLLOUT}.multi_turn.tool_config_path": "no/such.yaml"}, None, "'no/such.yaml' is no file"),
        ({}, UNRESOLVED, "cannot import 'nowhere'"),
        ({}, NO_SCHEMA, "no valid JSON Schema"),
        ({}, NO_NAME, "tool 'f': '<tool_call>' in its schema is a control token of the model's"),
        ({f"+{ROLLOUT}.custom.multiturn.tool_timeout": "3"}, None, "did you mean 'tool_timeout_s'"),
        ({f"{ROLLOUT}.multi_turn.format": "hermez"}, None, "unknown format 'hermez'"),
        (
            {f"{ROLLOUT}.multi_turn.tool_config_path": "null"},
            None,
            "nor function_tool_path names tools",
        ),
        (
            {f"{ROLLOUT}.agent.default_agent_loop": "multitrun_agent"},
            None,
            "or the column agent_name; did you mean 'multiturn_agent'?",
        ),
        ({f"+{ROLLOUT}.custom.multiturn.turns_reminder": "True"}, None, "max_assistant_turns is null, so no turns"),
        ({"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "3"}, None, "_gpu=3 does not divide them"),
        ({"ray_kwargs.ray_init.num_cpus": "4"}, None, "Ray has 4 logical CPUs and this run reserves 13"),
    ],
    ids=[
        "no_yaml",
        "no_class",
        "no_schema",
        "no_name",
        "unknown_setting",
        "unknown_format",
        "no_tools",
        "no_loop",
        "no_turns",
        "no_divisor",
        "few_cpus",
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    yaml_text: str | None,
    message: str,
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    if yaml_text is not None:
        changes = {**changes, f"{ROLLOUT}.multi_turn.tool_config_path": bad_yaml(tmp_path, yaml_text)}
    with pytest.raises(ConfigError, match=re.escape(message)):
        configuration.prepare_config(composed(**changes))


@pytest.mark.parametrize(
    ("loop", "name", "told"),
    [
        ("tool_agent", "sglang_async", True),
        ("single_turn_agent", "sglang_async", True),
        ("tool_agent", "sglang", False),
        ("multiturn_agent", "sglang_async", False),
    ],
)
def test_a_run_without_our_loop_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loop: str, name: str, told: bool
) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    changes = {f"{ROLLOUT}.agent.default_agent_loop": loop, f"{ROLLOUT}.name": name}
    off = {f"{ROLLOUT}.multi_turn.enable": "False"} if loop == "single_turn_agent" else {}
    configuration.prepare_config(composed(**{**changes, **off, "ray_kwargs.ray_init.num_cpus": "64"}))
    lines = [line for line in capsys.readouterr().err.splitlines() if "but no row uses the agent loop" in line]
    assert len(lines) == told
    assert not told or f"this run's loop is verl's {loop}, " in lines[0]


@pytest.mark.parametrize("rank", ["actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank"])
def test_adapters_are_served_under_verls_name_only(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    adapter = {rank: "8", "ray_kwargs.ray_init.num_cpus": "64"}
    with pytest.raises(ConfigError, match=rf"{rank}=8 .*set actor_rollout_ref.rollout.name=sglang, "):
        configuration.prepare_config(composed(**adapter))
    configuration.prepare_config(composed(**{**adapter, f"{ROLLOUT}.name": "sglang"}))
    configuration.prepare_config(composed(**{**adapter, "actor_rollout_ref.model.lora.merge": "True"}))


def test_the_cpu_platform_serves_no_adapters() -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.cpu import defaults

    config = composed(**{"actor_rollout_ref.model.lora_rank": "8", f"{ROLLOUT}.name": "sglang"})
    with pytest.raises(
        ConfigError, match=r"model.lora_rank=8 on the CPU platform: SGLang 0.5.12 serves adapters on GPUs"
    ):
        defaults.fill_in(config, 64)


def test_rows_decide_when_they_name_their_loop(tmp_path: Path) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    rows = [{"prompt": [{"role": "user", "content": "Q"}], "agent_name": "single_turn_agent"}]
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    rows_file = str(tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="'single_turn_agent' never calls a tool"):
        configuration.prepare_config(composed(**{"data.train_files": rows_file, "data.val_files": rows_file}))


def test_a_vision_language_model_without_its_processor(tmp_path: Path) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(ConfigError, match=r"model_type 'qwen2_5_vl'.*verl cannot load its processor"):
        configuration.prepare_config(composed(**{"actor_rollout_ref.model.path": str(tmp_path)}))


@pytest.fixture
def wrong_model(tmp_path: Path) -> Path:
    """Copy the quickstart's model, with `<|endoftext|>` as the token that ends a turn, as in SmolLM2's GGUF."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "recipes" / "quickstart" / "model", model)
    for name, right, wrong in (
        ("config.json", '"eos_token_id": 2', '"eos_token_id": 0'),
        ("generation_config.json", '"eos_token_id": 2', '"eos_token_id": 0'),
        ("tokenizer_config.json", '"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"'),
    ):
        text = (model / name).read_text()
        assert right in text
        (model / name).write_text(text.replace(right, wrong))
    return model


def test_a_template_that_cannot_be_trained_on(wrong_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    mode = f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode"
    ends = {"actor_rollout_ref.model.path": str(wrong_model)}
    for changes, message in (
        (ends, "a turn ends with an end token: the template ends a turn with '<|im_end|>"),
        ({**ends, mode: "ignore_strippable"}, "the engine would not stop"),
        ({f"{ROLLOUT}.multi_turn.format": "llama3"}, "does not read '<tool_call>"),
        ({mode: "lenient"}, "tokenization_sanity_check_mode='lenient': expected one of"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            configuration.prepare_config(composed(**changes))
    configuration.prepare_config(composed(**{**ends, mode: "disable", "ray_kwargs.ray_init.num_cpus": "32"}))


def test_a_template_is_examined_with_the_variables_that_the_run_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    model = tmp_path / "model"
    shutil.copytree(ROOT / "recipes" / "quickstart" / "model", model)
    template = model / "chat_template.jinja"
    dropped = "{% set messages = messages if answers else messages | rejectattr('role', 'equalto', 'tool') | list %}"
    template.write_text(dropped + template.read_text())
    changes = {"actor_rollout_ref.model.path": str(model), "ray_kwargs.ray_init.num_cpus": "64"}
    with pytest.raises(ConfigError, match="tool role rendered: "):
        configuration.prepare_config(composed(**changes))
    configuration.prepare_config(composed(**changes, **{"+data.apply_chat_template_kwargs.answers": "true"}))


def test_cpus_are_counted_for_our_loop_and_for_our_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    loop = f"{ROLLOUT}.agent.default_agent_loop"
    for changes in ({f"{ROLLOUT}.name": "sglang"}, {loop: "tool_agent"}):
        with pytest.raises(ConfigError, match="Ray has 4 logical CPUs"):
            configuration.prepare_config(composed(**changes, **{"ray_kwargs.ray_init.num_cpus": "4"}))
    others = {f"{ROLLOUT}.name": "sglang", loop: "tool_agent"}
    configuration.prepare_config(composed(**others, **{"ray_kwargs.ray_init.num_cpus": "4"}))


def test_runs_that_are_none_of_ours_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [], "agent_name": "tool_agent"}))
    loop = f"{ROLLOUT}.agent.default_agent_loop"
    # The data may name another loop than the default, and the check does not read it.
    for changes in (
        {"data.train_files": str(tmp_path)},
        {"data.train_files": str(tmp_path / "rows.jsonl")},
        {"data.custom_cls.path": "my_dataset.py"},
        {f"+{ROLLOUT}.agent.agent_loop_manager_class": "my.Manager", loop: "my_loop"},
    ):
        few = {f"{ROLLOUT}.name": "vllm", loop: "single_turn_agent", "ray_kwargs.ray_init.num_cpus": "4"}
        configuration.prepare_config(composed(**{**few, **changes}))


def test_a_file_that_is_no_parquet_is_not_read(tmp_path: Path) -> None:
    """Its rows have the default loop; verl refuses the file later."""
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    loop = {f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent"}
    for name in ("rows.arrow", "rows.txt", "rows"):
        (tmp_path / name).write_text("rows")
        files = {"data.train_files": str(tmp_path / name), "data.val_files": str(tmp_path / name)}
        with pytest.raises(ConfigError, match="'single_turn_agent' never calls a tool"):
            configuration.prepare_config(composed(**loop, **files))


def test_our_settings_may_refer_to_others() -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.startup.configuration import settings_of

    rollout = {"seconds": 7.5, "custom": {"multiturn": {"tool_timeout_s": "${seconds}"}}}
    assert settings_of(OmegaConf.create(rollout)).tool_timeout_s == 7.5


def test_other_programs_of_hydra_are_left_alone() -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.startup.configuration import StartUpCheck

    for config in ({"model": 1}, {"trainer": {"use_v1": True}}, {"actor_rollout_ref": {"rollout": {"multi_turn": {}}}}):
        StartUpCheck().on_run_start(OmegaConf.create(config))
        StartUpCheck().on_multirun_start(OmegaConf.create(config))


def test_what_the_check_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.chdir(tmp_path)
    config = composed(**{f"+{ROLLOUT}.custom.multiturn.record_dir": "records", "ray_kwargs.ray_init.num_cpus": "64"})
    configuration.prepare_config(config)
    ours = config.actor_rollout_ref.rollout.custom.multiturn
    assert ours.record_dir == str(tmp_path / "records")
    assert ours.tool_config_path == RIGHT[f"{ROLLOUT}.multi_turn.tool_config_path"]
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path is None
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang.device == "cpu"
    assert config.trainer.v1.trainer_mode == "multiturn_sync"


@pytest.mark.parametrize(
    ("changes", "mode", "told"),
    [
        (
            {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.checkpoint_engine.backend": "nccl"},
            "multiturn_separate_async",
            "",
        ),
        ({f"+{ROLLOUT}.custom.multiturn.certificate_share": "0.1"}, "multiturn_sync", ""),
        ({f"+{ROLLOUT}.custom.multiturn.certificate_share": "0"}, "multiturn_sync", ""),
        (
            {"trainer.v1.trainer_mode": "mine"},
            "mine",
            "trainer.v1.trainer_mode=mine: training batches are not verified",
        ),
        ({"trainer.use_v1": "False"}, "sync", "trainer.use_v1=False: training batches are not verified"),
        ({f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"}, "sync", "no row uses the agent loop multiturn_agent"),
    ],
)
def test_whose_trainer_runs(
    changes: dict[str, str],
    mode: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    config = composed(**{**changes, "ray_kwargs.ray_init.num_cpus": "64"})
    configuration.prepare_config(config)
    assert config.trainer.v1.trainer_mode == mode
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verl-multiturn:")]
    assert len(lines) == bool(told)
    assert told in "".join(lines)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("multi_turn.use_inference_chat_template", "True", "leave it out: the chat template of the model"),
        ("+multi_turn.num_repeat_rollouts", "4", "leave it out, and set rollout.n"),
    ],
)
def test_keys_that_nothing_reads_are_refused(
    key: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    plus, name = key[: key.startswith("+")], key.removeprefix("+")
    config = composed(**{f"{plus + plus}{ROLLOUT}.{name}": value})
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}={value}: nothing in verl 0.9.1 reads it; {remedy}"):
        configuration.prepare_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"over_sample_rate": "0.51"}, r"over_sample_rate=0\.51: expected a number from 0 to 0\.5, the share"),
        ({"over_sample_rate": "-0.1"}, r"over_sample_rate=-0\.1: expected a number"),
        ({"over_sample_rate": "1"}, r"over_sample_rate=1: expected a number"),
        ({"over_sample_rate": "nan"}, r"over_sample_rate=nan: expected a number"),
        ({"over_sample_rate": "inf"}, r"over_sample_rate=inf: expected a number"),
        ({"over_sample_rate": "'0.25'"}, r"over_sample_rate='0\.25': expected a number"),
        ({"over_sample_rate": "true"}, r"over_sample_rate=True: expected a number"),
        ({"over_sample_rate": "[0.25]"}, r"over_sample_rate=\[0\.25\]: expected a number"),
        (
            {"over_sample_rate": "0.25", "name": "sglang"},
            r"over_sample_rate=0\.25: with actor_rollout_ref\.rollout\.name='sglang' single generations cannot be",
        ),
        (
            {"over_sample_rate": "0.25", "trainer.use_v1": "False"},
            r"over_sample_rate=0\.25: only verl's own V1 trainers take it, got trainer\.use_v1=False",
        ),
        (
            {"over_sample_rate": "0.25", "trainer.v1.trainer_mode": "mine"},
            r"over_sample_rate=0\.25: only verl's own V1 trainers take it, .* trainer\.v1\.trainer_mode='mine'",
        ),
        (
            {"over_sample_rate": "0.25", "+agent.agent_loop_manager_class": "mine.Manager"},
            r"over_sample_rate=0\.25: .*agent_loop_manager_class='mine\.Manager' does not cut samples; leave it out",
        ),
    ],
)
def test_over_sampling_that_cannot_be(changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(ConfigError, match=message):
        over_sampled(changes, monkeypatch)


@pytest.mark.parametrize("rate", ["0", "0.0", "null", "0.25", "0.5"])
def test_over_sampling_that_can_be(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = over_sampled({"over_sample_rate": rate}, monkeypatch)
    agent = config.actor_rollout_ref.rollout.agent
    assert agent.agent_loop_manager_class == "verl_multiturn.verl_bridge.manager.MultiTurnManager"
    off = over_sampled({"over_sample_rate": "0", "name": "sglang", "trainer.use_v1": "False"}, monkeypatch)
    assert off.actor_rollout_ref.rollout.over_sample_rate == 0


def over_sampled(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check a configuration with these settings of the rollout or the trainer, and return it."""
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    named = {"ray_kwargs.ray_init.num_cpus": "64"}
    for key, value in changes.items():
        plus, name = key[: key.startswith("+")], key.removeprefix("+")
        named[name if name.startswith("trainer.") else f"{plus}{ROLLOUT}.{name}"] = value
    config = composed(**named)
    configuration.prepare_config(config)
    return config


def test_a_cluster_that_is_not_joined_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.startup import ray_cpus

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_cpus.cluster_address("ray://head:10001") == "ray://head:10001"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert ray_cpus.cluster_address(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert ray_cpus.cluster_address("auto") == "ray://head:10001"
    assert ray_cpus.cluster_address("local") is None  # Ray reads the variable for no address and "auto" alone


def cpu_config(address: str | None = None, **changes: Any) -> Any:
    from omegaconf import OmegaConf

    ray_init = {"address": address, "num_cpus": None if address else 4}
    return OmegaConf.create({"trainer": {"use_v1": True}, "ray_kwargs": {"ray_init": ray_init}, **changes})


def test_the_cpus_of_trainers_that_reserve_others_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import ray_cpus

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cpus, "ray", None)  # nothing is joined
    with pytest.raises(ConfigError, match=r"has 4 logical CPUs and this run reserves 9, .*: 8 workers; 1 controller"):
        ray_cpus.check_ray_cpus(cpu_config(), {"workers": 8, "controller": 1})
    for config in (
        cpu_config(trainer={"use_v1": False}),
        cpu_config(async_training={}),
        cpu_config(address="ray://head:10001"),
    ):
        ray_cpus.check_ray_cpus(config, {"workers": 9})


class Cluster:
    """Ray's functions for a cluster of 4 logical CPUs."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def init(self, address: str, **kwargs: Any) -> None:
        self.called.append(address)

    def cluster_resources(self) -> dict[str, float]:
        self.called.append("resources")
        return {"CPU": 4.0, "GPU": 1.0}

    def shutdown(self) -> None:
        self.called.append("shutdown")


def test_a_cluster_with_too_few_cpus_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn.verl_bridge.startup import ray_cpus

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = "192.0.2.1:6379"
    for need, told in ((4, ""), (5, f"the cluster at {address}: Ray has 4 logical CPUs and this run reserves 5,")):
        cluster = Cluster()
        monkeypatch.setattr(ray_cpus, "ray", cluster)
        ray_cpus.check_ray_cpus(cpu_config(address), {"workers": need})
        assert cluster.called == [address, "resources", "shutdown"]
        said = capsys.readouterr().err
        assert told in said
        assert bool(said) == bool(told)
