"""A wrong setting ends the trainer's command before Ray or an engine starts, with one clear error and status not 0."""

import copy
import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import ROOT
from tests.support.warm_python import run_with_stack

pytestmark = pytest.mark.stack

ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward.custom_reward_function"
RIGHT = {
    "actor_rollout_ref.model.path": str(ROOT / "recipes" / "quickstart" / "model"),
    f"{ROLLOUT}.name": "sglang_async",
    f"{ROLLOUT}.multi_turn.enable": "True",
    f"{ROLLOUT}.multi_turn.tool_config_path": str(ROOT / "tool_configs" / "calculator.yaml"),
    f"{ROLLOUT}.agent.default_agent_loop": "multiturn_agent",
    "trainer.n_gpus_per_node": "1",
}


def run(tmp_path: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    rows = tmp_path / "question.parquet"
    pd.DataFrame([{"prompt": [{"role": "user", "content": "Q"}]}]).to_parquet(rows)
    there = {"data.train_files": str(rows), "data.val_files": str(rows), "algorithm.adv_estimator": "grpo"}
    settings = {**RIGHT, **there, "hydra.run.dir": str(tmp_path / "hydra"), **changes}
    words = [f"{key}={value}" for key, value in settings.items()]
    return run_with_stack("-m", "verl.trainer.main_ppo", *words, cwd=tmp_path)


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
    assert done.stderr.count("verl-multiturn: actor_rollout_ref.rollout.") == 1
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
        ({"+custom.multiturn.tool_timeout_s": "3"}, None, "custom.multiturn: nothing reads these settings here"),
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
        (
            {"trainer.v1.trainer_mode": "colocate_asink"},
            None,
            "trainer.v1.trainer_mode='colocate_asink': no trainer has this name; did you mean 'colocate_async'?",
        ),
        (
            {f"+{ROLLOUT}.custom.multiturn.near_rewards": "all", "reward.reward_manager.name": "rate_limited"},
            None,
            "only naive and dapo keep nothing from one row to the next; set one of them",
        ),
        (
            {
                f"+{ROLLOUT}.custom.multiturn.old_log_prob_bound": "0.01",
                "algorithm.rollout_correction.bypass_mode": "True",
            },
            None,
            "verl then takes the engine's log-probs for all tokens",
        ),
        (
            {
                f"{REWARD}.path": "pkg://verl_multiturn.rewards",
                f"+{REWARD}.reward_kwargs.judge.url": "http://judge.corp:8000/v1",
            },
            None,
            f"{REWARD}.reward_kwargs.judge.url: the environment variable "
            "ALL_PROXY='socks://desk:1' names the proxy for judge.corp, and 'socks' is no kind of proxy",
        ),
        (
            {f"{REWARD}.path": "pkg://verl_multiturn.rewards", f"+{REWARD}.reward_kwargs.gsm8k.methud": "strict"},
            None,
            f"{REWARD}.reward_kwargs.gsm8k.methud: unknown setting; did you mean 'method'?",
        ),
        (
            {f"{REWARD}.path": "pkg://verl_multiturn.rewards", f"+{REWARD}.reward_kwargs": "strict"},
            None,
            f"{REWARD}.reward_kwargs='strict': expected a mapping",
        ),
        ({"ray_kwargs.ray_init.num_cpus": "4"}, None, "Ray has 4 logical CPUs and this run reserves 13"),
    ],
    ids=[
        "no_yaml",
        "no_class",
        "no_schema",
        "no_name",
        "unknown_setting",
        "wrong_place",
        "unknown_format",
        "no_tools",
        "no_loop",
        "no_turns",
        "no_divisor",
        "unknown_trainer",
        "manager_that_keeps",
        "no_pass",
        "no_proxy_of_the_judge",
        "unknown_option",
        "no_options",
        "few_cpus",
    ],
)
@pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")  # verl's trainers are imported
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
    monkeypatch.setenv("ALL_PROXY", "socks://desk:1")
    if yaml_text is not None:
        changes = {**changes, f"{ROLLOUT}.multi_turn.tool_config_path": bad_yaml(tmp_path, yaml_text)}
    with pytest.raises(ConfigError, match=re.escape(message)):
        configuration.prepare_config(composed(**changes))


@pytest.mark.parametrize(("manager", "source"), [("naive", "register"), ("dapo", "register"), ("naive", "importlib")])
def test_rewards_near_their_rows_have_managers_of_verl_that_keep_nothing(manager: str, source: str) -> None:
    from verl_multiturn.verl_bridge.startup.refusals.rewards import NEAR
    from verl_multiturn.verl_bridge.startup.view import RunView

    changes = {f"+{ROLLOUT}.custom.multiturn.near_rewards": "all", "reward.reward_manager.source": source}
    run = RunView(composed(**changes, **{"reward.reward_manager.name": manager}))
    assert (NEAR[0].message(run) is None) is (source == "register")


def test_a_tools_name_is_read_with_the_tokenizer_that_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    model = {"actor_rollout_ref.model.path": "some/model", f"{ROLLOUT}.multi_turn.format": "hermes"}
    tools = {f"{ROLLOUT}.multi_turn.tool_config_path": bad_yaml(tmp_path, NO_NAME)}
    changes = {**model, **tools, "ray_kwargs.ray_init.num_cpus": "64"}
    configuration.prepare_config(composed(**changes))  # the model does not lie on this machine
    tokenizer = {"actor_rollout_ref.model.tokenizer_path": RIGHT["actor_rollout_ref.model.path"]}
    with pytest.raises(ConfigError, match="in its schema is a control token of the model's"):
        configuration.prepare_config(composed(**changes, **tokenizer))


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
    lines = [line for line in capsys.readouterr().err.splitlines() if ": no row uses the agent loop" in line]
    assert len(lines) == told
    assert not told or f"This run's loop is verl's {loop}, " in lines[0]


@pytest.mark.parametrize(
    ("limits", "changes", "told"),
    [
        ("{response_characters: 12000}", {}, 1),
        ("{response_characters: 12000}", {f"{ROLLOUT}.multi_turn.max_tool_response_length": "12000"}, 0),
        ("{response_characters: 12000}", {f"+{ROLLOUT}.custom.multiturn.observation_length": "500"}, 0),
        ("{timeout_s: 5}", {}, 0),
    ],
)
def test_a_tools_own_limit_that_never_acts_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limits: str,
    changes: dict[str, str],
    told: int,
) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    tool = f"{(ROOT / 'tool_configs' / 'calculator.yaml').read_text()}\n    limits: {limits}\n"
    tools = {f"{ROLLOUT}.multi_turn.tool_config_path": bad_yaml(tmp_path, tool)}
    configuration.prepare_config(composed(**tools, **changes, **{"ray_kwargs.ray_init.num_cpus": "64"}))
    lines = [line for line in capsys.readouterr().err.splitlines() if "limits.response_characters=12000" in line]
    assert len(lines) == told
    assert not told or "max_tool_response_length=256: tool 'calculator' keeps" in lines[0]


def test_the_cpu_platform_serves_no_adapters() -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.cpu import defaults

    config = composed(**{"actor_rollout_ref.model.lora_rank": "8"})
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

    from verl_multiturn.verl_bridge.settings import settings_of

    rollout = {"seconds": 7.5, "custom": {"multiturn": {"tool_timeout_s": "${seconds}"}}}
    assert settings_of(OmegaConf.create(rollout)).tool_timeout_s == 7.5


def test_settings_are_validated_once_for_each_content(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    from verl_multiturn import ConfigError
    from verl_multiturn.config import settings
    from verl_multiturn.verl_bridge.settings import settings_of

    validated: list[Any] = []
    monkeypatch.setattr(settings, "read_model", partial(_noted, validated, settings.read_model))
    ours = {"tool_timeout_s": 7.0625, "proxy": {"harbor": {"harness_kwargs": {"a": [1]}}}}
    rollout = OmegaConf.create({"custom": {"multiturn": ours}})
    first = settings_of(rollout)
    assert all(settings_of(each) is first for each in (rollout, copy.deepcopy(rollout), OmegaConf.create(rollout)))
    assert len(validated) == 1
    rollout.custom.multiturn.proxy.harbor.harness_kwargs.a.append(2)  # a changed configuration has its own answers
    assert [settings_of(rollout).proxy.harbor.harness_kwargs, first.proxy.harbor.harness_kwargs] == [
        {"a": [1, 2]},
        {"a": [1]},
    ]
    for wrong, message in (("soon", "tool_timeout_s"), (True, "expected a number, got True")):
        rollout.custom.multiturn.tool_timeout_s = wrong
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                settings_of(rollout)
    assert len(validated) == 6
    rollout.custom.multiturn.tool_timeout_s = 1.0
    rollout.custom.multiturn.proxy.harbor.harness_kwargs.a = [1]
    assert settings_of(rollout).tool_timeout_s == 1.0
    # A number equal to it is another content, and refused.
    rollout.custom.multiturn.tool_timeout_s = True
    with pytest.raises(ConfigError, match="expected a number, got True"):
        settings_of(rollout)


def _noted(validated: list[Any], read_model: Any, model: Any, raw: Any, where: str) -> Any:
    validated.append(raw)
    return read_model(model, raw, where)


@pytest.mark.parametrize("custom", ["text", "", 0, [], [1]])
def test_a_custom_section_that_is_no_section(custom: Any) -> None:
    from omegaconf import OmegaConf

    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.settings import settings_of

    with pytest.raises(ConfigError, match=rf"rollout\.custom: expected a mapping, got {re.escape(repr(custom))}"):
        settings_of(OmegaConf.create({"custom": custom}))


def test_the_page_of_settings_lists_every_refusal() -> None:
    from verl_multiturn.verl_bridge.startup.settings_page import PAGE, write_page

    page = PAGE.read_text(encoding="utf-8")
    assert page == write_page(page), "run python -m verl_multiturn.verl_bridge.startup.settings_page"


def test_the_texts_of_all_rows_name_what_there_is() -> None:
    from verl_multiturn.verl_bridge.startup.refusals import BEFORE_PLATFORM, FILES, LAST, SETTINGS, VALUES, VERLS
    from verl_multiturn.verl_bridge.startup.settings_page import AnyValue
    from verl_multiturn.verl_bridge.startup.table import RefusalRow, fill, named
    from verl_multiturn.verl_bridge.startup.view import RunView

    run = RunView(composed())
    rows = [check for section in VALUES + FILES + BEFORE_PLATFORM + SETTINGS + VERLS + LAST for check in section.checks]
    for row in (check for check in rows if isinstance(check, RefusalRow)):
        assert named(row, lambda key: f"{key}={run.value(key)!r}")
        for template in (row.why, row.remedy, row.given):
            assert not re.search(r"\{\w", fill(template, run=run, found=AnyValue()))


@pytest.mark.parametrize("is_fully_async", [True, False])
def test_the_fully_asynchronous_program_has_its_own_sizes_of_batches(is_fully_async: bool) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup.verl_checks import check_verls_classes
    from verl_multiturn.verl_bridge.startup.view import RunView

    sizes = {f"actor_rollout_ref.{key}_micro_batch_size_per_gpu": "4" for key in ("actor.ppo", "rollout.log_prob")}
    sizes |= {"data.train_batch_size": "0", "algorithm.adv_estimator": "grpo"}
    if is_fully_async:
        check_verls_classes(RunView(composed(**sizes, **{"+async_training": "{staleness_threshold: 0.1}"})))
        return
    with pytest.raises(ConfigError, match=r"train_batch_size \(0\) must be >= actor\.ppo_mini_batch_size"):
        check_verls_classes(RunView(composed(**sizes)))


def test_other_programs_of_hydra_are_left_alone() -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.startup.configuration import StartUpCheck

    for config in ({"model": 1}, {"trainer": {"use_v1": True}}, {"actor_rollout_ref": {"rollout": {"multi_turn": {}}}}):
        StartUpCheck().on_run_start(OmegaConf.create(config))
        StartUpCheck().on_multirun_start(OmegaConf.create(config))
