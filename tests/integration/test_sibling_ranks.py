"""Ranks of siblings in the real worker, loop and reward manager, with a scripted model and a judge on loopback."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import ROOT, until
from tests.ranking_judge import RankingJudge, ranking

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

CRITERION = {"name": "kind", "text": "The letter is kind."}
ROW = {"data_source": "rubric/letters", "reward_model": {"ground_truth": ""}, "extra_info": {"index": 3}}


def reward_config(options: dict[str, Any]) -> Any:
    """Return the part of verl's configuration about rewards, with these options of `rubric`."""
    from omegaconf import OmegaConf

    function = {"path": "pkg://verl_multiturn.rewards", "name": "compute_score"}
    reward = {
        "reward_manager": {"name": "naive", "source": "register"},
        "custom_reward_function": {**function, "reward_kwargs": {"rubric": options}},
        "reward_model": {"enable": False},
    }
    return OmegaConf.create({"reward": reward})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")


class World:
    """A worker whose siblings write letters: sample `i` one of the quality `i + 1`, after `delays[i]` seconds."""

    def __init__(self, tokenizer: Any, folder: Path, options: dict[str, Any], **settings: Any) -> None:
        from omegaconf import OmegaConf
        from verl.workers.rollout.replica import TokenOutput

        from benchmarks.oversample_world import Script, ScriptedClient, ScriptedWorker, _sample
        from verl_multiturn.verl_bridge.loops.rewards import NearRewards

        world = self
        self.delays: dict[int, float] = {}
        self.fails: set[int] = set()

        class Client(ScriptedClient):
            async def generate(self, request_id: str, **asked: Any) -> TokenOutput:
                number = _sample.get()[1]
                await asyncio.sleep(world.delays.get(number, 0))
                if number in world.fails:
                    raise ConnectionError("the server died")
                ids = self._encode(f"A letter of quality {number + 1}.<|im_end|>")
                told = {"global_steps": 0}
                return TokenOutput(
                    token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields=told
                )

        class Worker(ScriptedWorker):
            async def _put_rows(self, keys: list[str], fields: Any, tags: Any, partition_id: str) -> None:
                for i, key in enumerate(keys):
                    extra, metrics = fields["extra_fields"][i], fields["metrics"][i]
                    world.rows[key] = SimpleNamespace(
                        score=float(fields["rm_scores"][i].sum()),
                        report=getattr(extra, "data", extra)["reward_extra_info"],
                        stats=getattr(metrics, "data", metrics)["rollout"],
                    )

        self.rows: dict[str, Any] = {}
        self.worker = Worker(Script(), tokenizer, folder, **{"n": 4, **settings})
        self.worker.llm_client, self.worker.mm_processor_kwargs = Client(Script(), tokenizer), {}
        config = self.worker.config
        OmegaConf.update(config, "actor_rollout_ref.rollout", {"custom": {"multiturn": {"near_rewards": "all"}}})
        config.reward = reward_config(options).reward
        self.worker.reward_loop_worker_handles = NearRewards.handles(config, tokenizer, ["a far one"])

    async def run(self, rows: tuple[int, ...] = (0,), **prompt: Any) -> None:
        from verl_multiturn.rewards import aclose

        try:
            await self.worker.run_groups(rows, **{**ROW, **prompt})
        finally:
            await aclose()

    @property
    def scores(self) -> dict[int, float]:
        """Scores by the number of the sample."""
        return {int(key.split("_")[1]): row.score for key, row in sorted(self.rows.items())}

    @property
    def statuses(self) -> dict[str, str]:
        return self.worker.status


@pytest.fixture
def judge() -> Iterator[tuple[RankingJudge, dict[str, Any]]]:
    with ranking() as served:
        yield served


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path, judge: Any) -> Any:
    return lambda options=None, **settings: World(tokenizer, tmp_path, {**judge[1], **(options or {})}, **settings)


async def test_siblings_are_ranked_when_the_last_has_ended_and_their_rows_have_the_ranks(make: Any, judge: Any) -> None:
    questions = []
    for delays in ({0: 0.02, 1: 0.01}, {3: 0.02}):
        world = make()
        world.delays = delays
        await world.run()
        assert world.scores == {0: 0.0, 1: pytest.approx(1 / 3), 2: pytest.approx(2 / 3), 3: 1.0}
        assert world.statuses == {"row0": "finished"}
        assert json.loads(world.rows["row0_2_0"].report["verdicts"]) == {
            "rank": pytest.approx(2 / 3), "rivals": 3.0, "disagreements": 0.0,
        }  # fmt: skip
        questions.append(sorted(json.dumps(each["conversations"]) for each in judge[0].asked))
        judge[0].asked.clear()
    assert questions[0] == questions[1], "whichever ended first"
    assert [len(each) for each in questions] == [2, 2]
    assert not world.worker._siblings


async def test_the_places_of_siblings_come_of_the_row_and_not_of_the_uid(make: Any, judge: Any) -> None:
    orders = []
    for row, index in ((0, 0), (1, 0), (2, 7)):
        await make().run((row,), index=index)
        orders.append(sorted(json.dumps([*each["conversations"].values()]) for each in judge[0].asked))
        judge[0].asked.clear()
    assert orders[0] == orders[1] != orders[2]


async def test_an_outage_of_the_judge_is_that_of_the_whole_group(make: Any, judge: Any) -> None:
    judge[0].script = "away"
    world = make(custom={"multiturn": {"outage": {"mode": "mask"}}})
    await world.run((0, 1))
    assert len(world.rows) == 8
    assert {row.score for row in world.rows.values()} == {0.0}
    assert all(row.stats["unrewarded"] and row.report["outage"] == 1.0 for row in world.rows.values())


async def test_a_group_waits_for_the_end_of_an_outage_and_is_asked_about_again(make: Any, judge: Any) -> None:
    judge[0].script, world = "away", make(n=2)
    watch: Any = world.worker._rewards._watch
    for row in range(20):
        group = asyncio.create_task(world.run((row,)))
        await until(lambda: group.done() or watch.is_open)  # noqa: B023  # of this round
        if watch.is_open:
            break
    assert row > 1
    judge[0].script = "quality"
    await group
    last = [world.rows[f"row{row}_{number}_0"] for number in (0, 1)]
    assert [(each.score, each.stats["unrewarded"]) for each in last] == [(0.0, False), (1.0, False)]
    earlier = [each for each in world.rows.values() if each not in last]
    assert len(earlier) == 2 * row
    assert all(each.score == 0.0 and each.stats["unrewarded"] for each in earlier)


async def test_a_judge_without_a_verdict_gives_all_of_them_zero(make: Any, judge: Any) -> None:
    judge[0].script = "unsure"
    world = make()
    await world.run()
    assert world.scores == dict.fromkeys(range(4), 0.0)
    assert all(row.report["failed"] == 1.0 and not row.stats["unrewarded"] for row in world.rows.values())


async def test_an_invalid_sibling_is_not_compared(make: Any, judge: Any) -> None:
    world = make()
    world.fails = {1}
    await world.run()
    assert world.scores == {0: 0.0, 1: 0.0, 2: 0.5, 3: 1.0}
    assert [len(each["conversations"]) for each in judge[0].asked] == [3, 3]
    assert world.rows["row0_1_0"].report["verdicts"] == ""


async def test_one_alone_has_the_criteria_or_is_left_out(make: Any, judge: Any) -> None:
    judge[0].script = lambda asked: json.dumps({"ticket": asked["ticket"], "grades": {"kind": 0.25}})
    for options, score, left_out in (({"criteria": [CRITERION]}, 0.25, False), ({}, 0.0, True)):
        world = make(options)
        world.fails = {0, 2, 3}
        await world.run()
        assert world.scores == {0: 0.0, 1: score, 2: 0.0, 3: 0.0}
        assert world.rows["row0_1_0"].stats["unrewarded"] is left_out


async def test_a_sibling_that_raises_fails_its_group_and_no_question_is_asked(make: Any, judge: Any) -> None:
    from verl_multiturn.verl_bridge.loops.agent_loop import MultiTurnAgentLoop

    run = MultiTurnAgentLoop.run

    async def raising(self: Any, sampling: Any, **row: Any) -> Any:
        if row["session_id"] == 2:
            await asyncio.sleep(0.01)
            raise TypeError("a mistake of an author")
        return await run(self, sampling, **row)

    world = make()
    with mock.patch.object(MultiTurnAgentLoop, "run", raising):
        await world.run()
    assert world.statuses == {"row0": "failure"}
    assert judge[0].asked == []
    assert all(row.stats["unrewarded"] for row in world.rows.values())


async def test_samples_that_are_cut_are_not_waited_for(make: Any, judge: Any) -> None:
    world = make(over_sample_rate=0.25)  # 6 begin
    world.delays = {1: 60, 4: 60}
    began = asyncio.get_running_loop().time()
    await world.run()
    assert asyncio.get_running_loop().time() - began < 60
    assert world.scores == {0: 0.0, 2: pytest.approx(1 / 3), 3: pytest.approx(2 / 3), 5: 1.0}
    assert [len(each["conversations"]) for each in judge[0].asked] == [4, 4]


async def test_a_validation_is_not_ranked(make: Any, judge: Any) -> None:
    judge[0].script = lambda asked: json.dumps({"ticket": asked["ticket"], "grades": {"kind": 0.75}})
    world = make({"criteria": [CRITERION]})
    await world.run(validate=True, __rollout_n__=2)
    assert world.scores == {0: 0.75, 1: 0.75}
    assert judge[0].asked == []


async def test_a_validation_without_criteria_ends_the_run_by_name(make: Any) -> None:
    world = make()
    await world.run(validate=True)
    ((_, told), *_) = await world.worker.finished(0)
    assert "there are no criteria" in told.mistake


async def test_a_judge_that_is_not_configured_ends_the_run_by_name(make: Any) -> None:
    world = make({"model": None})
    await world.run()
    assert "expected 'url' and 'model'" in next(end.mistake for _, end in await world.worker.finished(0) if end.mistake)


async def test_a_cancelled_group_asks_no_more_and_writes_nothing(make: Any, judge: Any) -> None:
    world = make()
    hanging = asyncio.Event()
    judge[0].hangs_until = hanging
    running = asyncio.create_task(world.run())
    await until(lambda: judge[0].asked)
    assert await world.worker.cancel(["row0"]) == 1
    hanging.set()
    await asyncio.gather(running, return_exceptions=True)
    assert world.rows == {}
    assert not world.worker._siblings


async def test_a_replay_takes_the_recorded_verdicts_and_asks_no_judge(tokenizer: Any) -> None:
    from tests.integration.trainer_rows import make_output
    from verl_multiturn.verl_bridge.offline.replay.scores import Scores, UnrepeatableError

    options = {"url": "http://127.0.0.1:9/v1", "model": "judge", "relative": True, "criteria": [CRITERION]}
    scores = Scores(reward_config(options), tokenizer)
    sample = {"data_source": "rubric/letters", "ground_truth": "", "extra_info": {}, "messages": [], "index": 0}

    async def now(verdicts: dict[str, float]) -> float:
        return await scores.of(
            {"sample": sample}, [await asyncio.to_thread(make_output, "u", 0, ["A letter.<|im_end|>"])], verdicts
        )

    assert await now({"rank": 0.625, "rivals": 4.0, "disagreements": 1.0}) == 0.625
    assert await now({"kind": 0.25}) == 0.25
    with pytest.raises(UnrepeatableError, match="no verdict of it is recorded"):
        await now({})
    with pytest.raises(UnrepeatableError, match="of other criteria"):
        await now({"short": 1.0})


async def test_nothing_of_a_group_is_trained_whose_judge_is_away(tokenizer: Any, monkeypatch: Any) -> None:
    from tests.integration.test_outages import FakeKeeper, trainer_of
    from tests.integration.trainer_rows import WritableStore, make_output, put_in_place, step
    from tests.long.rewards.rubric_rows import trained_tokens
    from verl_multiturn.calls.outages.process import Outages
    from verl_multiturn.config import OutageSettings
    from verl_multiturn.rewards import aclose
    from verl_multiturn.verl_bridge.loops.rewards import Rewards
    from verl_multiturn.verl_bridge.workers.sibling_ranks import SiblingRanks

    store = WritableStore()
    store.kv_list = lambda partition_id: {partition_id: {}}  # type: ignore[attr-defined]
    put_in_place(store, monkeypatch)
    options = {"url": "http://127.0.0.1:9/v1", "model": "judge", "relative": True, "attempts": 1}
    ranks = SiblingRanks(reward_config(options), tokenizer)
    group = [await asyncio.to_thread(make_output, "u", number, [f"Letter {number}.<|im_end|>"]) for number in range(3)]
    columns = {**ROW, "uid": "u", "global_steps": 1, "index": 0}
    rewards = Rewards(Outages(OutageSettings(mode="mask")), True)
    await ranks.compare(rewards, [([output], {**columns, "session_id": n}) for n, output in enumerate(group)], False)
    await aclose()
    for number, output in enumerate(group):
        store.add("u", number, output)
    assert trained_tokens(store) > 0
    trainer = trainer_of(FakeKeeper(), actor_rollout_ref__rollout__n=3)
    metrics = await asyncio.to_thread(step, trainer, store.batch())
    assert trained_tokens(store) == 0
    assert metrics["rollout/certificate/violations"] == 0
