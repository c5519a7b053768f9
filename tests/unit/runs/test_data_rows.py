"""Rows that cannot be scored, have no agent, or are fewer than a batch are refused before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.unit.runs.test_early_refusals import refusal
from verl_multiturn.cli.main import app

GOOD = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "4"},
}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


BAD = {
    "no data_source": ([without("data_source")], "row 0 has no data_source"),
    "no reward_model": ([without("reward_model")], "row 0 has no reward_model"),
    "a null": ([GOOD, {**GOOD, "reward_model": None}], "row 1 has no reward_model"),
    "no ground_truth": ([{**GOOD, "reward_model": {"style": "rule"}}], "row 0 has no ground_truth in its reward_model"),
    "a text": ([{**GOOD, "reward_model": "4"}], "row 0 has no ground_truth in its reward_model, which is '4'"),
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(train: Path, val: Path, batch: int = 1) -> list[str]:
    sizes = [f"data.train_batch_size={batch}", f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}"]
    sizes += ["actor_rollout_ref.actor.use_dynamic_bsz=True"]
    return [f"data.train_files={train}", f"data.val_files={val}", *sizes]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("case", BAD)
def test_rows_that_cannot_be_scored(tmp_path: Path, suffix: str, case: str) -> None:
    rows, message = BAD[case]
    good, bad = write(tmp_path / f"good{suffix}", [GOOD, GOOD]), write(tmp_path / f"bad{suffix}", rows)
    assert f"data.train_files: {bad}: {message}" in refusal(tmp_path, *words(bad, good))
    assert f"data.val_files: {bad}: {message}" in refusal(tmp_path, *words(good, bad))
    assert refusal(tmp_path, *words(good, good)) == ""


def test_rows_that_something_else_scores(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.parquet", [without("reward_model")])
    assert refusal(tmp_path, *words(bad, bad), "mt.tool_reward.mode=replace") == ""
    assert "has no reward_model" in refusal(tmp_path, *words(bad, bad), "mt.tool_reward.mode=add")
    agents = write(tmp_path / "agents.parquet", [{**without("reward_model"), "agent_name": "proxy_agent"}])
    assert "reward_model" not in refusal(tmp_path, *words(agents, agents))


def test_rows_that_no_route_fits(tmp_path: Path) -> None:
    function = "reward.custom_reward_function"
    ours = [f"{function}.path='pkg://verl_multiturn.rewards'", f"{function}.name=compute_score"]

    def asked(train: Path, val: Path, routes: str, *more: str) -> str:
        route = f"{'' if routes == 'null' else '+'}{function}.reward_kwargs.routes={routes}"
        return refusal(tmp_path, *words(train, val), *ours, *([] if routes == "null" else [route]), *more)

    mine = write(tmp_path / "mine.parquet", [{**GOOD, "data_source": "my/quiz"}] * 2)
    sums = write(tmp_path / "sums.jsonl", [{**GOOD, "data_source": "gsm8k"}, GOOD])
    said = asked(mine, mine, "{your/*: my_rewards.reward}")
    assert f"data.train_files: {mine}: row 0: data_source 'my/quiz' has no reward; known are ['your/*', " in said
    assert "reward_kwargs.routes='{my/quiz: REWARD}'" in said
    assert asked(mine, mine, "{MY/*: my_rewards.reward}") == ""
    assert f"data.val_files: {sums}: row 1: data_source 'sums'" in asked(mine, sums, "{my/*: math}")
    assert asked(mine, sums, "{my/*: math}", "trainer.test_freq=-1", "trainer.val_before_train=False") == ""
    assert asked(mine, mine, "null", "mt.tool_reward.mode=replace") == ""
    agents = write(tmp_path / "agents.parquet", [{**GOOD, "agent_name": "proxy_agent"}])
    assert "has no reward" not in asked(agents, agents, "null")
    own = [{**GOOD, "agent_name": "my_loop"}, {**GOOD, "data_source": "gsm8k", "agent_name": "multiturn_agent"}]
    beside = write(tmp_path / "own.jsonl", own)  # a loop of the user's own may give its reward itself
    assert "has no reward" not in asked(beside, beside, "{my/*: math}")


def test_fewer_rows_than_a_batch(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.parquet", [GOOD] * 7)
    assert "data.train_files has 7 rows: fewer than the 8 of a batch" in refusal(tmp_path, *words(rows, rows, 8))
    assert refusal(tmp_path, *words(rows, rows, 7)) == ""
    most = refusal(tmp_path, *words(rows, rows, 7), "data.train_max_samples=3")
    assert "data.train_files has 3 rows: fewer than the 7 of a batch" in most


@pytest.mark.parametrize("case", BAD)
def test_validate_refuses_rows_that_cannot_be_scored(tmp_path: Path, case: str) -> None:
    rows, message = BAD[case]
    path = write(tmp_path / "rows.jsonl", rows)
    command = ["validate", str(ROOT / "tool_configs" / "calculator.yaml"), "--dataset", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert message in result.output
    assert CliRunner().invoke(app, [*command, "--no-scores"]).exit_code == 0


def test_validate_refuses_criteria_that_cannot_be_read(tmp_path: Path) -> None:
    wrong = {"extra_info": {"criteria": [{"name": "kind", "text": "It is kind.", "weight": -1}]}}
    path = tmp_path / "rows.jsonl"
    command = ["validate", str(ROOT / "tool_configs" / "calculator.yaml"), "--dataset", str(path)]
    write(path, [{**GOOD, **wrong, "data_source": "rubric/essays"}])
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "row 0: extra_info.criteria[0].weight: Input should be greater than 0, got -1" in result.output
    assert CliRunner().invoke(app, [*command, "--no-scores"]).exit_code == 0
    write(path, [{**GOOD, **wrong}])  # another reward's rows may have such a key
    assert CliRunner().invoke(app, command).exit_code == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "row 0: agent_name=None names no agent loop; name one of ['multiturn_agent', "),
        ("multitrun_agent", "row 0: agent_name='multitrun_agent' is no agent loop; did you mean 'multiturn_agent'?"),
        (5, "row 0: agent_name=5 names no agent loop"),
        (["multiturn_agent"], "row 0: agent_name=['multiturn_agent'] names no agent loop"),
        ({"name": "multiturn_agent"}, "row 0: agent_name={'name': 'multiturn_agent'} names no agent loop"),
        ("tool_agent", ""),
        ("my_own_loop", ""),
    ],
)
def test_validate_refuses_rows_without_an_agent(tmp_path: Path, name: Any, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{**GOOD, "agent_name": name}])
    result = CliRunner().invoke(
        app, ["validate", str(ROOT / "tool_configs" / "calculator.yaml"), "--dataset", str(path)]
    )
    assert result.exit_code == int(bool(message))
    assert message in result.output


def test_rows_of_the_run_itself_are_looked_at_when_they_are_made(tmp_path: Path) -> None:
    from verl_multiturn.cli.run import refuse_early
    from verl_multiturn.errors import ConfigError
    from verl_multiturn.runs.plan import plan_run
    from verl_multiturn.runs.run import run_configuration

    plan = plan_run("quickstart", out=tmp_path / "out")
    run_configuration(plan, refuse_early, "later")
    run_configuration(plan, refuse_early, "maybe")
    with pytest.raises(ConfigError, match=r"train.parquet' is no file"):
        run_configuration(plan, refuse_early, "there")
    (tmp_path / "out" / "data").mkdir(parents=True)
    for name in ("train", "test"):
        write(tmp_path / "out" / "data" / f"{name}.parquet", [GOOD])
    run_configuration(plan, refuse_early, "later")  # they may be made anew
    for own_files in ("maybe", "there"):
        with pytest.raises(ConfigError, match=r"data.train_files has 1 rows: fewer than the 16 of a batch"):
            run_configuration(plan, refuse_early, own_files)


def test_validate_leaves_the_score_to_an_interaction_or_an_agent(tmp_path: Path) -> None:
    users = tmp_path / "users.yaml"
    scripted = "verl_multiturn.interactions.scripted_user.ScriptedUser"
    users.write_text(f"interaction: [{{name: user, class_name: {scripted}, config: {{}}}}]")
    by_user = {"prompt": GOOD["prompt"], "extra_info": {"interaction_kwargs": {"user": {"turns": ["no"]}}}}
    by_agent = {"prompt": GOOD["prompt"], "agent_name": "proxy_agent"}
    calculator = str(ROOT / "tool_configs" / "calculator.yaml")
    for row, more in ((by_user, ["--interactions", str(users)]), (by_agent, [calculator])):
        path = write(tmp_path / "rows.jsonl", [row])
        result = CliRunner().invoke(app, ["validate", *more, "--dataset", str(path)])
        assert result.exit_code == 0, result.output
