"""The recipe proxy_quickstart: its agents behind the real endpoint, on a scripted engine, and its report."""

import asyncio
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.integration.test_session_rows import trainer_of
from tests.integration.trainer_rows import WritableStore, put_in_place, step
from tests.recipe_scripts import RECIPES, composed, prepared
from verl_multiturn import ScriptedEngine
from verl_multiturn.proxy.agents.agent import load_agent
from verl_multiturn.records.read.records import read_records
from verl_multiturn.records.rows import columns

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
RECORDS = "actor_rollout_ref.rollout.custom.multiturn.record_dir"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.syspath_prepend(RECIPES / "quickstart")
    return prepared("quickstart", tmp_path / "data", "--train-size", "4", "--test-size", "2")["train"]


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(composed("quickstart").actor_rollout_ref.model.path)


def policy(decode: Callable[[Any], str], encode: Callable[[str], list[int]], seed: int) -> Any:
    """Return a script that plans, calls the calculator, and answers rightly or wrongly.

    Its text depends on the session and the prompt alone: sessions send requests at the same time, in any order.
    """

    def say(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        text = decode(ids)
        draw = random.Random(f"{seed} {request_id.partition('.')[0]} {list(ids)}")
        if "<tool_response>" in text:
            result = text.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
            said = f"Answer: {result}" if draw.random() < 0.5 else "Answer: 1"
        elif "planner" in text or draw.random() < 0.3:
            said = "Answer: 7"
        else:
            said = CALL % text.partition("problem: ")[2].partition(" =")[0].partition("\n")[0]
        return encode(f"{said}<|im_end|>")

    return say


def play(folder: Path, rows: list[dict[str, Any]], *variants: str, sessions: int = 1) -> tuple[list[Any], list[Any]]:
    """Run the recipe's agent for each row; return the records, and `(uid, session, outputs)` of each session."""
    from verl_multiturn.verl_bridge.loops.life import follow
    from verl_multiturn.verl_bridge.loops.proxy_loop import build_endpoint
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    config = composed("proxy_quickstart", *variants, overrides=[f"{RECORDS}={folder}/records"])
    own = tokenizer()
    engine = ScriptedEngine(policy(own.decode, own.encode, seed=3), version=3)

    async def run() -> list[Any]:
        runner = build_runner(config, LoadedModel(own, "qwen2"), engine)
        endpoint = build_endpoint(runner)
        assert runner.records is not None

        async def one(number: int, session: int) -> Any:
            told = {"raw_prompt": rows[number]["prompt"], "agent_name": "proxy_agent", "global_steps": 4}
            row = {**rows[number], **told, "uid": f"row{number}", "session_id": session}
            name, sampling = f"{number} {session}", {"temperature": 1.0}
            with follow(row, runner.records, name=name):
                outcome, receipts = await endpoint.run(name, row, sampling)
                assert (outcome.error, outcome.stop_reason) == ("", "finished")
                return f"row{number}", session, runner.finish(outcome, receipts, row, 4, sampling)

        try:
            return await asyncio.gather(*(one(i, j) for i in range(len(rows)) for j in range(sessions)))
        finally:
            await endpoint.aclose()
            await runner.records.aclose()

    played = asyncio.run(run())
    records = list(read_records(folder / "records"))
    return records, played


def test_the_agents_are_plain_programs() -> None:
    from recipes.proxy_quickstart import agent, branches

    for module in (agent, branches):
        assert "verl" not in {name.partition(".")[0] for name in _imported(Path(str(module.__file__)))}
        assert load_agent(f"{module.__name__}:run", "here").form == "keywords"
    assert agent.call_calculator('{"expression": "12 - 3 * -4"}') == "24"
    assert agent.call_calculator('{"expression": "__import__(1)"}').startswith("Error: ValueError")
    assert agent.call_calculator('"x"').startswith("Error: TypeError")


def _imported(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if line.startswith(("import ", "from ")):
            yield line.split()[1]


def test_its_prompts_are_those_of_the_built_in_loop(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    from recipes.proxy_quickstart.same_prompts import compare

    records, played = play(tmp_path, rows, sessions=3)
    assert {len(outputs) for _, _, outputs in played} == {1}
    found = compare(records, tmp_path / "data")
    assert (found.first, found.different, found.other_results, found.equal) == (12, 0, 0, True)
    assert 0 < found.later < 12
    # One token more, in the first prompt or in the result of a tool, is found.
    changed = json.loads(json.dumps(records))
    changed[0]["rows"][0]["ids"][3] += 1
    assert compare(changed, tmp_path / "data").different > 0
    changed = json.loads(json.dumps(records))
    called = next(record for record in changed if 2 in columns(record["rows"][0])["sources"])
    row = called["rows"][0]
    row["ids"][columns(row)["sources"].index(2)] += 1
    assert compare(changed, tmp_path / "data").different == 1
    # So is a session of another row.
    records[0]["messages"][1]["content"] = "What is 1 + 1?"
    assert not compare(records, tmp_path / "data").equal


@pytest.mark.parametrize("credit", ["session", "discounted", "completion"])
def test_the_branches_learn_what_the_definition_says(
    tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, credit: str
) -> None:
    from recipes.proxy_quickstart.credit_check import Told, difference
    from recipes.proxy_quickstart.written_loss import spans

    gamma = 1.0 if credit == "session" else 0.9
    records, played = play(tmp_path, rows, "branches", *([] if credit == "session" else [credit]), sessions=4)
    store = WritableStore()
    put_in_place(store, monkeypatch)
    for uid, session, outputs in played:
        assert len(outputs) == 3
        for row, output in enumerate(outputs):
            store.add(uid, session, output, row)
    metrics = step(trainer_of(credit, gamma), store.batch())
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/proxy/rows/mean"] == 3
    trained = [
        spans(row["response_mask"].tolist(), row["advantages"].tolist())
        for row in map(store.rows.get, store.rows)
        if row
    ]
    own = tokenizer()
    answers = {row["extra_info"]["question"]: row["extra_info"]["answer"] for row in rows}
    told = Told(credit, gamma, lambda ids: own.decode(ids, skip_special_tokens=True), answers)
    assert max(abs(value) for row in trained for _, value in row) > 0.5
    assert difference(records, trained, told) <= 1e-6  # type: ignore[operator]
    # Each part of it counts: another credit, a single advantage.
    other = Told("discounted" if credit == "session" else "session", 0.9, told.decode, answers)
    assert difference(records, trained, other) > 1e-3  # type: ignore[operator]
    tokens, value = trained[5][0]
    trained[5] = [(tokens, value + 2e-6), *trained[5][1:]]
    assert difference(records, trained, told) > 1e-6  # type: ignore[operator]
    with pytest.raises(ValueError, match="not those of the records"):
        difference(records, trained[1:], told)
    trained[5] = [(tokens, math.nan), *trained[5][1:]]
    with pytest.raises(ValueError, match="given the advantage nan, expected a number"):
        difference(records, trained, told)
    # A run that trained nothing has nothing that is equal.
    assert difference([{**record, "valid": False} for record in records], [], told) is None


def test_rows_whose_advantages_are_nearly_equal_are_paired_with_their_own() -> None:
    """Groups with other spreads differ in the sixth digit only: by the epsilon beside the standard deviation."""
    from recipes.proxy_quickstart.credit_check import largest_difference

    first, second = 1.125 / (0.75 + 1e-6), 0.375 / (0.25 + 1e-6)
    expected = [[(5, first)], [(5, second)], [(5, 0.5), (7, first)], [(5, 0.1), (7, first)]]
    noisy = [[(tokens, value + 6e-8 * (-1) ** number) for tokens, value in row] for number, row in enumerate(expected)]
    for order in itertools.permutations(noisy):
        assert largest_difference(expected, order) == pytest.approx(6e-8)
    assert largest_difference(expected, [[(5, second)], *noisy[1:]]) == pytest.approx(first - second)
    assert largest_difference(expected, [*noisy[:3], [(7, 0.1), (5, first)]]) is None
    assert largest_difference(expected, noisy[1:]) is None


@pytest.mark.parametrize("proxy", [{"command": ["./agent.sh"]}, {"agent": None, "command": ["./agent.sh"]}], ids=str)
def test_a_run_of_a_command_is_reported(proxy: dict[str, Any], tmp_path: Path) -> None:
    from recipes.proxy_quickstart.report import report

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5, "timing_s/step": 2.0}}\n')
    (tmp_path / "start_up.json").write_text('{"seed": 3}')
    (tmp_path / "records").mkdir()
    settings = {"actor_rollout_ref": {"rollout": {"custom": {"multiturn": {"proxy": proxy}}}}}
    (tmp_path / "hydra" / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(settings), tmp_path / "hydra" / ".hydra" / "config.yaml")
    found = report(tmp_path)
    assert (found["seed"], found["steps"], found["reward_last_10"], found["prompt_ids_equal"]) == (3, 1, 0.5, False)


def test_optimizer_steps_are_counted_also_where_there_was_none(tmp_path: Path) -> None:
    import torch

    from recipes.proxy_quickstart.report import optimizer_steps_per_batch

    assert optimizer_steps_per_batch(tmp_path, 2) is None
    actor = tmp_path / "checkpoints" / "global_step_2" / "actor"
    actor.mkdir(parents=True)
    for state, steps in (({}, 0.0), ({0: {"step": torch.tensor(4.0)}}, 2.0)):
        torch.save({"state": state}, actor / "optim_world_size_1_rank_0.pt")
        assert optimizer_steps_per_batch(tmp_path, 2) == steps


def test_its_settings_are_the_quickstarts() -> None:
    ours, theirs = (OmegaConf.to_container(composed(name)) for name in ("proxy_quickstart", "quickstart"))
    different = {each.partition("=")[0] for each in _values(ours) ^ _values(theirs)}
    assert {name for name in different if not name.startswith("recipe.")} == {
        "algorithm.adv_estimator",
        "data.tool_config_path",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "actor_rollout_ref.rollout.multi_turn.enable",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls",
        "actor_rollout_ref.rollout.custom.multiturn.request_timeout_s",
        "actor_rollout_ref.rollout.custom.multiturn.proxy.agent",
    }


def _values(value: Any, path: str = "") -> set[str]:
    """Return `path=value` of each setting, with one name for both recipes."""
    if isinstance(value, dict):
        return {found for key, each in value.items() for found in _values(each, f"{path}.{key}" if path else key)}
    return {f"{path}={value!r}".replace("proxy_quickstart", "quickstart")}
