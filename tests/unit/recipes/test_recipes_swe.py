"""The recipe swe: its rows, the commands that its tiny model knows, and the agent with a real workspace and verdict."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent_sessions import call_text, certified, make_run, turns
from tests.recipe_scripts import RECIPES, composed, prepared, script
from verl_multiturn.certificate.receipts import Receipts
from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import ConfigError
from verl_multiturn.harnesses import mini_swe
from verl_multiturn.harnesses.mini_swe import MiniSettings
from verl_multiturn.harnesses.runners import build_runner, check_agent
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.task_sets.swe.mutations import mutations_of
from verl_multiturn.task_sets.swe.tasks import SweTask, installed

pytest.importorskip("toolz")
pytest.importorskip("minisweagent")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(RECIPES / "swe"), *sys.path])


def frequencies() -> SweTask:
    """Return the task whose mistake is a sign in toolz' `frequencies`."""
    path = "toolz/itertoolz.py"
    found = mutations_of(path, installed("toolz").files[path])
    (mutation,) = (each for each in found if (each.function, each.after) == ("frequencies", "-="))
    return SweTask(
        package="toolz",
        version=installed("toolz").version,
        mutation=mutation,
        failing=("toolz/tests/test_itertoolz.py::test_frequencies",),
        passing=("toolz/tests/test_itertoolz.py::test_peek", "toolz/tests/test_itertoolz.py::test_nth"),
        statement="A test fails.",
        twins=("toolz/tests/test_itertoolz.py::test_frequencies",),
    )


def test_the_rows_name_the_task_and_the_agents_settings() -> None:
    task = frequencies()
    row = script("swe").row(task, MiniSettings("mini.yaml", 20, 180.0), False)
    info = row["extra_info"]
    assert row["prompt"] == [{"role": "user", "content": "A test fails."}]
    assert SweTask.model_validate_json(info["task"]) == task
    assert MiniSettings(**info["agent"]) == MiniSettings("mini.yaml", 20, 180.0)
    assert json.dumps(row).count("def ") == 0  # no file of the package is in the row


def test_what_the_tiny_model_knows_mends_every_mistake(tmp_path: Path) -> None:
    """The commands run on the host here, on copies: of one line and of several, with quotes and backslashes."""
    commands_of = script("swe", "by_heart").commands_of
    for path in ("toolz/itertoolz.py", "toolz/functoolz.py"):
        source = installed("toolz").files[path]
        for mutation in mutations_of(path, source)[::40]:
            task = frequencies().model_copy(update={"mutation": mutation})
            copy = tmp_path / path
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(mutation.apply(source))
            look, mend, _ = commands_of(task)
            shown = subprocess.run(look, shell=True, cwd=tmp_path, check=True, capture_output=True).stdout
            assert mutation.after.encode().split(b"\n")[0] in shown
            subprocess.run(mend, shell=True, cwd=tmp_path, check=True)
            assert copy.read_bytes() == source, mutation


def test_a_missing_package_is_found_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mini_swe.package.cache_clear()
    monkeypatch.setitem(sys.modules, "minisweagent", None)
    monkeypatch.delitem(sys.modules, "recipes.swe.agent", raising=False)
    with pytest.raises(ConfigError, match="mini-swe-agent cannot be imported"):
        check_agent(ProxySettings(agent="recipes.swe.agent:run"))
    with pytest.raises(ConfigError, match="mini-swe-agent cannot be imported"):
        prepared("swe", tmp_path, "--packages", "toolz", "--smoke")


async def play(task: SweTask, *commands: str) -> Outcome:
    row: dict[str, Any] = script("swe").row(task, MiniSettings(step_limit=6), False)
    runner = build_runner(ProxySettings(agent="recipes.swe.agent:run"))
    said = [call_text("bash", {"command": command}) for command in commands]
    run = make_run(turns(*said), prompt_length=30_000, response_length=30_000)
    endpoint = Endpoint(run, runner, ProxyServer(), 300.0, -1.0)
    try:
        outcome, generations = await endpoint.run("r", {**row, "raw_prompt": row["prompt"]}, {})
    finally:
        await endpoint.aclose()
    receipts = Receipts.of_rows("r", generations, outcome.places, "u", 0, False, not outcome.valid)
    assert certified(outcome, receipts) == []
    return outcome


async def test_a_repair_is_paid_and_what_a_model_can_cause_is_not() -> None:
    task, commands_of = frequencies(), script("swe", "by_heart").commands_of
    look, mend, submit = commands_of(task)
    weaken = "sed -i 's/assert/pass; 0 and/' toolz/tests/test_itertoolz.py"
    paid = [await play(task, *said) for said in ((look, mend, submit), (weaken, submit), ("kill -9 -1",))]
    assert [outcome.session.reward for outcome in paid if outcome.session] == [1.0, 0.0, 0.0]
    assert {(outcome.stop_reason, outcome.valid, len(outcome.rows)) for outcome in paid} == {
        (StopReason.FINISHED, True, 1)
    }


def test_the_original_is_not_in_the_agents_workspace() -> None:
    from verl_multiturn.task_sets.swe.draw import settings_for
    from verl_multiturn.workspaces.threads import open_workspace

    with open_workspace(settings_for("toolz")) as workspace:
        found = workspace.run("python -c 'import pytest, toolz'; find / -name itertoolz.py 2>/dev/null")
    assert "No module named 'toolz'" in found.output
    assert "itertoolz.py" not in found.output


@pytest.mark.stack
def test_the_variants_settings() -> None:
    plain, deepswe, rebench = composed("swe"), composed("swe", "deepswe"), composed("swe", "rebench")
    assert [config.recipe.prepare["step-limit"] for config in (plain, deepswe, rebench)] == [20, 50, 200]
    assert (deepswe.algorithm.adv_estimator, deepswe.actor_rollout_ref.rollout.custom.multiturn.proxy.max_rows) == (
        "rloo",
        1,
    )
    assert rebench.trainer.v1.trainer_mode == "colocate_async"
