"""The start-up check of a function of advantages: its place, its options, and what goes with it."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.integration import test_start_up_paths as paths
from verl_multiturn import ConfigError

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

ROLLOUT = "actor_rollout_ref.rollout"
OURS = f"{ROLLOUT}.custom.multiturn"
PROXY = {
    f"{ROLLOUT}.agent.default_agent_loop": "proxy_agent",
    f"{ROLLOUT}.multi_turn.tool_config_path": "null",
    f"{ROLLOUT}.n": "4",
    f"{OURS}.proxy.agent": "tests.endpoint_agents:chat",
    f"{OURS}.request_timeout_s": "60",
}
CODE = """
print("imported")

def right(group, *, by: float = 1.0):
    return [0.0] * len(group)

def needs(group, weight):
    return [0.0] * len(group)

async def later(group):
    return []

class NoState:
    def __call__(self, group):
        return []

class BadState(NoState):
    def state_dict(self):
        return {"a": (1, 2)}

    def load_state_dict(self, state):
        pass
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start in a folder with the author's file."""
    import pandas as pd

    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    pd.DataFrame(paths.ROWS).to_parquet(tmp_path / "rows.parquet")
    yield str(tmp_path / "rows.parquet")
    paths._right.cache_clear()


def started(rows: str, estimator: str = "own.py:right", **changes: str) -> Any:
    from verl_multiturn.verl_bridge.startup.configuration import check_run

    config = paths.composed(rows, **{"algorithm.adv_estimator": estimator, **changes})
    check_run(config)
    return config


def test_a_function_in_a_file(rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = started(rows, **{f"{OURS}.advantage.options": "{by: 2}"})
    assert config.algorithm.adv_estimator == f"{tmp_path}/own.py:right"
    assert config.trainer.v1.trainer_mode == "multiturn_sync"
    assert "imported" not in capfd.readouterr().out  # the file was, in a process of its own


@pytest.mark.usefixtures("imports_in_a_fork")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{ROLLOUT}.n": "1"}, ""),  # a running mean needs no other conversation
        ({f"{OURS}.context.mode": "window", f"{ROLLOUT}.multi_turn.max_assistant_turns": "4"}, ""),
        ({f"{OURS}.filter": "refill", f"{ROLLOUT}.n": "4"}, ""),
        ({f"{OURS}.filter": "skip", f"{ROLLOUT}.n": "4"}, "a group of equal rewards may have advantages other than 0"),
        ({"algorithm.gamma": "0.9"}, "algorithm.gamma=0.9: .* discounts turns, not tokens; leave it at 1.0"),
        ({"trainer.use_v1": "False"}, "adv_estimator='.*own.py:right': only verl's own V1 trainers take it"),
        ({f"{OURS}.advantage.options": "{of: 2}"}, r"advantage\.options\.of: .*own.py:right' takes by; "),
        ({f"{OURS}.advantage.options": "{by: much}"}, r"advantage\.options\.by='much': .* refuses it: "),
        ({"algorithm.adv_estimator": "own.py:rihgt"}, "own.py' has no 'rihgt'; did you mean 'right'"),
        ({"algorithm.adv_estimator": "gone.py:right"}, "adv_estimator='gone.py:right': there is no such file; correct"),
        ({"algorithm.adv_estimator": "no_such_package.mod:f"}, "cannot import 'no_such_package.mod'"),
        ({"algorithm.adv_estimator": "own.py:needs"}, r"needs the option 'weight'; set .*advantage\.options\.weight"),
        ({"algorithm.adv_estimator": "own.py:later"}, "is asynchronous"),
        ({"algorithm.adv_estimator": "own.py:NoState"}, "has no state_dict and no load_state_dict; write"),
        ({"algorithm.adv_estimator": "own.py:BadState"}, r"state_dict\(\): it\['a'\] is \(1, 2\) of type tuple"),
        (
            {"algorithm.adv_estimator": "grpo", f"{OURS}.advantage.options": "{by: 2}"},
            "no effect with .*=grpo; set the",
        ),
        ({**PROXY}, ""),
        (
            {**PROXY, f"{OURS}.proxy.credit": "completion"},
            "proxy.credit='completion': it has no effect with .*own.py:r",
        ),
        ({**PROXY, f"{OURS}.proxy.gamma": "0.5"}, "proxy.gamma=0.5: it has no effect with .*credit=session"),
        ({**PROXY, "algorithm.adv_estimator": "mt_gigpo"}, "set it to mt_grpo, with .*, or to a function of your own"),
    ],
)
def test_what_goes_with_a_function_of_ones_own(rows: str, changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        started(rows, **changes)


def test_without_an_agent_loop_of_ours_it_is_refused(rows: str) -> None:
    changes = {f"{ROLLOUT}.agent.default_agent_loop": "tool_agent", f"{ROLLOUT}.name": "sglang"}
    for estimator in ("own.py:right", "mt_grpo"):
        with pytest.raises(
            ConfigError, match=rf"adv_estimator='{re.escape(estimator)}': .* agent loop multiturn_agent"
        ):
            started(rows, estimator, **changes)


def test_what_has_no_effect_beside_it_is_named(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    started(rows, **{"algorithm.norm_adv_by_std_in_grpo": "False"})
    assert "algorithm.norm_adv_by_std_in_grpo=False: this has no effect without" in capsys.readouterr().err


def test_the_settings_of_before_are_options_with_a_note(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {f"{OURS}.advantage": "{gamma: 0.9, across: rows}", f"{ROLLOUT}.n": "4"}
    started(rows, "mt_gigpo", **before)
    said = capsys.readouterr().err
    for name, option in (("gamma=0.9", "gamma=0.9"), ("across=rows", "across_rows=True")):
        assert (
            f"advantage.{name}: it is an option of the estimator now; write {OURS}.advantage.options.{option}" in said
        )
    with pytest.raises(ConfigError, match=r"advantage\.options\.across_rows: .*mt_turns.* takes gamma"):
        started(rows, "mt_turns", **before)


def test_an_early_check_finds_the_file_and_imports_nothing(rows: str) -> None:
    from verl_multiturn.verl_bridge.startup.configuration import check_early

    config = paths.composed(rows, **{"algorithm.adv_estimator": "own.py:rihgt"})
    check_early(config, is_on_cpu=True)
    OmegaConf.update(config, "algorithm.adv_estimator", "gone.py:right")
    with pytest.raises(ConfigError, match=r"'gone\.py:right': there is no such file"):
        check_early(config, is_on_cpu=True)
