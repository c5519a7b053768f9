"""`verl-multiturn run NAME --check` refuses the same as the start: docs/reference/refusals.md, walked."""

import copy
import functools
import json
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.integration.test_refusals import RIGHT, ROLLOUT
from tests.support.warm_python import stack_python, variables
from tests.trainer_config import compose_config

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),  # verl's trainers are imported
]

LOOPS = {
    "ours": {
        f"{ROLLOUT}.agent.default_agent_loop": "multiturn_agent",
        f"+{ROLLOUT}.custom.multiturn.filter": "skip",
        f"+{ROLLOUT}.custom.multiturn.otc.form": "grpo",
        f"+{ROLLOUT}.custom.multiturn.prefix_tree": "on",
        f"+{ROLLOUT}.custom.multiturn.reference_reset.every": "2",
        "reward.custom_reward_function.path": "pkg://verl_multiturn.rewards",
        "reward.custom_reward_function.name": "compute_score",
        "+reward.custom_reward_function.reward_kwargs.rubric.relative": "true",
    },
    "agents": {f"{ROLLOUT}.agent.default_agent_loop": "proxy_agent"},
    "verl's": {f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"},
}
"""Runs of which each section of the table applies to one."""


@functools.cache
def configuration(loop: str) -> Any:
    settings = {**RIGHT, **LOOPS[loop], "algorithm.adv_estimator": "grpo", "ray_kwargs.ray_init.num_cpus": "64"}
    return compose_config([f"{key}={value}" for key, value in settings.items()])


def sections() -> list[Any]:
    from verl_multiturn.verl_bridge.startup.refusals import BEFORE_PLATFORM, FILES, LAST, SETTINGS, VALUES, VERLS

    return [*VALUES, *FILES, *BEFORE_PLATFORM, *SETTINGS, *VERLS, *LAST]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty the whole table, so that only a test's own entries can refuse a run."""
    from verl_multiturn.verl_bridge.startup import configuration as start_up

    monkeypatch.setattr(start_up, "config_hooks", [])
    monkeypatch.setattr(start_up, "check_own_code", lambda run, is_imported: None)
    kept = [(section.checks, list(section.checks)) for section in sections()]
    for checks, _ in kept:
        checks.clear()
    yield
    for checks, before in kept:
        checks[:] = before


def applies(section: Any) -> str:
    """Return the run to which a section applies."""
    from verl_multiturn.verl_bridge.startup.view import RunView

    return next(loop for loop in LOOPS if section.applies(RunView(configuration(loop))))


def test_the_dry_start_asks_every_section_of_the_table(silent: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal that is put into a section of the documented table ends the start, and so the dry start."""
    from verl_multiturn.verl_bridge.startup.configuration import StartUpCheck
    from verl_multiturn.verl_bridge.startup.table import RefusalRow

    for section in sections():
        section.checks.append(RefusalRow(section.title, lambda run: True, "walked", "go on", given=section.title))
        with pytest.raises(SystemExit) as ended:
            StartUpCheck().on_run_start(copy.deepcopy(configuration(applies(section))))
        assert ended.value.code == 2
        assert f"{section.title}: walked; go on" in capsys.readouterr().err
        section.checks.clear()


def test_the_dry_start_asks_each_check_once(silent: None) -> None:
    from verl_multiturn.verl_bridge.startup.configuration import StartUpCheck

    asked: list[str] = []
    for section in sections():
        if section.at_once is None:
            section.checks.append(lambda run, title=section.title: asked.append(title))
    for loop in LOOPS:
        asked.clear()
        StartUpCheck().on_run_start(copy.deepcopy(configuration(loop)))
        assert len(asked) == len(set(asked)) >= 10


def test_the_page_lists_what_is_walked() -> None:
    page = (ROOT / "docs" / "reference" / "refusals.md").read_text(encoding="utf-8")
    titles = [section.title for section in sections()]
    assert [title for title in titles if f"\n## {title}\n" not in page] == []
    assert page.count("\n## ") >= len(titles)


def checked(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `verl-multiturn run quickstart --check` in a fork, and verl's part in another."""
    return subprocess.run(
        [stack_python(), "-m", "verl_multiturn.cli", "run", *words, "--check", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
        env={**variables(), "PYTHON": stack_python(), **environment},
        cwd=tmp_path,
    )


def test_a_run_that_would_start_is_shown(tmp_path: Path) -> None:
    done = checked(tmp_path, "quickstart", "data.train_batch_size=32", "mt.tir.stop=[boxed]")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "  - actor_rollout_ref.rollout.custom.multiturn.tir.stop=['boxed']: this has no effect" in done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    expected = {
        "recipe": "quickstart",
        "batch": 32,
        "n": 8,
        "turns": 3,
        "rows": None,
        "estimator": "grpo",
        "tensor_parallel": 1,
        "device": "cpu",
    }
    assert {key: told.get(key) for key in expected} == expected
    assert "32 prompts × 8 = 256 conversations a step" in done.stdout
    assert "ray init kwargs" not in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstart", "algorithm.adv_estimator=rlooo"], "did you mean 'rloo'?"),
        (["gsm8k_multiturn", "--variant", "lora", "--mode", "separate_async"], "the untrained model for ever"),
        (["gsm8k_multiturn", "trainer.n_gpus_per_node=3"], "an engine takes 2 GPUs, and trainer.nnodes=1 × "),
        (["quickstart", "ray_kwargs.ray_init.num_cpus=3"], "Ray has 3 logical CPUs and this run reserves "),
        (["quickstart", f"{ROLLOUT}.multi_turn.format=hermez"], "unknown format 'hermez'"),
        (["quickstart", f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml"], "cannot import 'nowhere'"),
        (["quickstart", f"{ROLLOUT}.agent.default_agent_loop=multitrun_agent"], "did you mean 'multiturn_agent'?"),
        (["quickstart", "reward.custom_reward_function.path=reward.py"], "reward.py' has no 'compute_score'"),
        (
            ["quickstart", "distillation.enabled=True"],
            "distillation: verl does not take these settings (model_path must be specified",
        ),
        (
            ["quickstart", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"],
            "actor_rollout_ref.actor: verl does not take these settings ([actor] Please set at least one of",
        ),
    ],
    ids=["estimator", "adapter_apart", "gpus", "cpus", "format", "tool", "loop", "reward", "teacher", "micro_batch"],
)
def test_what_the_start_refuses_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: nowhere.Tool}]")
    (tmp_path / "reward.py").write_text("score = 1\n")
    done = checked(tmp_path, *words)
    assert done.returncode == 2, done.stdout + done.stderr[-2000:]
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or "start-up checks" in done.stdout


def test_a_critic_and_a_reference_are_those_of_verl() -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    from verl_multiturn.verl_bridge.startup.view import RunView

    for changes in (
        {"critic.enable": None, "algorithm.adv_estimator": "gae"},
        {"critic.enable": None, "algorithm.adv_estimator": "grpo"},
        {"critic.enable": False, "algorithm.adv_estimator": "gae"},
        {"critic.enable": True, "algorithm.use_kl_in_reward": True},
        {"actor_rollout_ref.actor.use_kl_loss": True},
    ):
        config = copy.deepcopy(configuration("ours"))
        for key, value in changes.items():
            OmegaConf.update(config, key, value)
        run = RunView(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # verl warns that there is no critic
            assert run.has_critic == bool(need_critic(config))
        assert run.has_reference == bool(need_reference_policy(config))


def test_verls_classes_are_read_as_python_reads_them() -> None:
    import dataclasses

    from verl.workers.config import RolloutConfig

    from verl_multiturn.verl_bridge.startup import verl_classes

    fields = {field.name: field for field in dataclasses.fields(RolloutConfig)}
    assert set(verl_classes.fields_of("RolloutConfig")) == set(fields)
    for name, field in fields.items():
        default = verl_classes.default_of("RolloutConfig", name)
        if field.default is not dataclasses.MISSING:
            assert default == field.default, name
        elif field.default_factory in (dict, list):
            assert default == field.default_factory(), name


def test_verls_names_are_those_that_it_registers() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.utils.tracking import Tracking

    from verl_multiturn.advantages.estimators import ESTIMATORS
    from verl_multiturn.verl_bridge.names import LOOPS_OF_VERL, TRACE_BACKENDS
    from verl_multiturn.verl_bridge.startup import verl_names
    from verl_multiturn.verl_bridge.traces.backends import BACKENDS

    assert verl_names.estimators() == set(ADV_ESTIMATOR_REGISTRY) - set(ESTIMATORS)
    assert verl_names.policy_losses() <= set(POLICY_LOSS_REGISTRY)
    assert verl_names.loggers() == set(Tracking.supported_backend)
    assert tuple(BACKENDS) == TRACE_BACKENDS
    import verl.experimental.agent_loop  # noqa: F401
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    assert set(_agent_loop_registry) >= LOOPS_OF_VERL
