"""The simulated asynchronous training: the world itself, and a short form of `benchmarks.staleness`."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

GROUPS = 480


def test_two_requests_share_the_engine_and_tools_wait_for_nobody() -> None:
    from benchmarks.async_world import Draw, Engine, World

    world = World(Engine(token_s=0.02, token_s_each=0.04))
    world.submit("a", None, [Draw([10, 10], [3.0])], step=1)
    world.submit("b", None, [Draw([5], [])], step=1)
    world.wait(100)
    assert world.now == pytest.approx(0.5)  # both at 10 tokens per second
    assert world.partitions["train"]["b"]["status"] == "finished"
    world.wait(100)
    # `a` needs 5 more tokens, alone; then its call, and 10 tokens.
    assert world.now == pytest.approx(0.5 + 5 * 0.06 + 3 + 10 * 0.06)
    assert world.partitions["train"]["a"]["status"] == "finished"


def test_tokens_have_the_version_of_their_weights() -> None:
    from benchmarks.async_world import Draw, Engine, World

    world = World(Engine(token_s=0.1))
    group = world.submit("a", None, [Draw([20, 10], [1.0])], step=1)
    world.sleep(0.5)
    world.publish()
    world.sleep(1.0)
    world.pause()
    world.sleep(4.0)  # a paused engine samples nothing
    world.publish()
    world.resume()
    world.wait(100)
    assert world.now == pytest.approx(5.5 + 0.5 + 1 + 1)
    assert group.sessions[0].tokens == pytest.approx({0: 5, 1: 10, 2: 15})
    assert world.partitions["train"]["a_0_0"] == {"min_global_steps": 0, "max_global_steps": 2}


def test_an_engine_that_is_full_lets_requests_wait() -> None:
    from benchmarks.async_world import Draw, Engine, World

    world = World(Engine(token_s=0.1, most=2))
    world.submit("a", None, [Draw([10, 5], [0.4])], step=1)
    world.submit("b", None, [Draw([20], [])], step=1)
    world.submit("c", None, [Draw([20], [])], step=1)
    world.submit("d", None, [Draw([10], [])], step=1)
    world.sleep(0.1)
    world.cancel("c")
    ends = {}
    for _ in range(3):
        world.wait(100)
        ended = {uid for uid, tag in world.partitions["train"].items() if tag.get("status") == "finished"}
        ends.update(dict.fromkeys(ended - ends.keys(), round(world.now, 6)))
    # At 1 s `a` calls and `d` begins, because `c` is cancelled. At 1.4 s `a` comes back, and waits until 2 s.
    assert ends == {"b": 2.0, "d": 2.0, "a": 2.5}


def test_requests_are_prefilled_again_after_a_pause_and_the_last_comes_first() -> None:
    from benchmarks.async_world import Draw, Engine, World

    world = World(Engine(token_s=0.1, prefill_s=0.5))
    for uid in "ab":
        world.submit(uid, None, [Draw([10, 10], [3.0])], step=1)
    world.sleep(1.5)  # 1 s of prefilling, 5 tokens
    world.pause()
    world.resume()
    # 1 s of prefilling and 5 tokens; the second turn finds its tokens in the cache.
    world.wait(100)
    world.wait(100)
    assert world.now == pytest.approx(1.5 + 1 + 0.5 + 3 + 1)

    world = World(Engine(token_s=0.1, most=1, prefill_s=0.5))
    groups = [world.submit(uid, None, [Draw([10], [])], step=1) for uid in "abc"]
    world.sleep(1.0)
    world.pause()
    world.pause()  # as a trainer does that has paused already
    world.sleep(1.0)
    world.publish()
    world.resume()
    ends = []
    for _ in groups:
        world.wait(100)
        ends.append(world.now)
    assert ends == pytest.approx([3.5, 5.0, 6.0])  # c, b, and a, which had 5 tokens
    assert [group.sessions[0].tokens for group in groups] == [
        pytest.approx({0: 5, 1: 5}),
        pytest.approx({1: 10}),
        pytest.approx({1: 10}),
    ]


def test_nothing_of_a_cancelled_group_is_written() -> None:
    from benchmarks.async_world import Draw, Engine, World

    world = World(Engine(token_s=0.1))
    world.submit("a", None, [Draw([10], []), Draw([20], []), Draw([5, 5], [9.0])], step=1)
    world.submit("b", None, [Draw([60], [])], step=1)
    world.sleep(1.5)
    assert sorted(world.partitions["train"]) == ["a", "a_0_0", "b"]
    world.cancel("a")
    world.wait(100)
    assert sorted(world.partitions["train"]) == ["b", "b_0_0"]
    assert world.now == pytest.approx(6)


@pytest.mark.parametrize("policy", ["drop", "wait", "mask", "reroll"])
@pytest.mark.parametrize(("eta", "warmup"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 2)])
def test_the_bound_holds_for_every_warm_up(policy: str, eta: int, warmup: int) -> None:
    from benchmarks.async_training import Setting
    from benchmarks.staleness import measure

    measured = measure(Setting(policy, eta, warmup), GROUPS)
    assert measured["over_age"] == 0
    assert measured["max_age"] <= eta
    assert measured["consumed"] == GROUPS
    assert (measured["prompts_lost"] > 0) is (policy == "drop" and min(eta, warmup) > 0)
    if policy in ("drop", "wait"):
        assert measured["masked"] == 0


@pytest.mark.parametrize("policy", ["drop", "wait", "mask", "reroll"])
def test_the_bound_holds_with_several_updates_and_on_shared_gpus(policy: str) -> None:
    from benchmarks.async_training import Setting
    from benchmarks.staleness import measure

    for setting in (Setting(policy, 1, 1, updates=4), Setting(policy, 2, 2, mode="colocated")):
        measured = measure(setting, GROUPS)
        assert measured["over_age"] == 0
        assert measured["masked"] == 0 or policy in ("mask", "reroll")


def test_without_our_buffer_it_does_not() -> None:
    """With verl's buffer, `wait` lets old tokens through once the warm-up reaches its threshold."""
    from benchmarks.async_training import Setting
    from benchmarks.staleness import measure

    assert measure(Setting("capacity rule", 1, 1), GROUPS)["over_age"] > 0.05
    assert measure(Setting("verl wait", 1, 1), GROUPS)["over_age"] == 0
    assert measure(Setting("verl wait", 1, 2), GROUPS)["over_age"] > 0.8  # verl iterates over sets: 0.900 ± 0.002


def test_a_claim_that_does_not_hold_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.async_training import Setting
    from benchmarks.staleness import settings, unkept

    fine = {"over_age": 0.0, "masked": 0.0, "prompts_lost": 0.0, "seconds_per_step": 6.0}
    found = {setting: dict(fine) for setting in settings()}
    assert len(found) == 88
    found[Setting("wait", 1, 1)]["seconds_per_step"] = 9.0
    assert unkept(found) == []
    found[Setting("drop", 1, 1)]["prompts_lost"] = 3.0  # `drop` may
    found[Setting("drop", 2, 2)]["over_age"] = 0.01
    found[Setting("wait", 2, 3)]["masked"] = 0.01
    found[Setting("mask", 4, 5)]["prompts_lost"] = 1.0
    found[Setting("reroll", 2, 2)]["seconds_per_step"] = 7.0
    assert unkept(found) == [
        "drop, eta=2, warmup=2: trains tokens beyond the bound",
        "wait, eta=2, warmup=3: leaves tokens to the mask",
        "mask, eta=4, warmup=5: loses prompts",
        "reroll, eta=2, warmup=2: takes 1.17 times as long as 'no bound'",
    ]
    assert "reroll takes 0.67 times as long as 'wait' at eta=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "ends"),
    [
        ("sync", [12, 24, 36]),
        ("colocate_async", [12, 19, 31]),  # the third batch, of the second step, cannot begin before 19
        ("separate_async", [12, 19, 26]),
    ],
)
def test_step_times_by_hand(mode: str, ends: list[float]) -> None:
    """A conversation takes 1 s of generation, 3 s of its tool, and 1 s; a step trains 6 s; a transfer takes 1 s."""
    from benchmarks.async_sim import setting_of
    from benchmarks.async_training import Training, Workload
    from benchmarks.async_world import Draw, Engine

    workload = Workload(
        slowness=lambda rng: 0.0,
        conversations=lambda prompt, rng: [Draw([10, 10], [3.0])] * 2,
        batch_size=2,
        training_s=6.0,
        sync_s=1.0,
        engine=Engine(token_s=0.1),
    )
    assert Training(setting_of(mode, 1, "reroll"), workload).run(6).ends == pytest.approx(ends)


def test_the_predictions_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import async_sim, async_sim_cache, async_sim_setting
    from benchmarks.async_sim import main

    monkeypatch.setattr(logging.root.manager, "disable", 0)  # the benchmark sets it; later tests look at the log
    monkeypatch.setattr(async_sim, "hours", functools.cache(async_sim.hours))  # 3 s of CPU
    monkeypatch.setattr(async_sim_setting, "RIGHT_SHARES", (0.5,))
    cache = {"3.6": {"faster": 1.7, "read": 0.2}}
    monkeypatch.setattr(async_sim_cache, "faster", lambda: cache)
    run: dict[str, Any] = {"training_s": 2.0, "sync_s": 0.5, "token_s": 0.1, "token_s_each": 0.0}
    run |= {"call_tokens": 20.0, "answer_tokens": 10.0, "calls": [[0] * 8] * 40}
    runs = {"sync": {**run, "step_s": [3.5] * 4}, "separate_async": {**run, "step_s": [4.0, 2.5, 2.5, 2.5]}}
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(runs))
    assert main(["--measured", str(file), "--steps", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["predicted"] == {
        "sync": {"all": 3.5, "second_half": 3.5},
        "separate_async": {"all": 2.75, "second_half": 2.5},
    }
    assert found["measured"]["separate_async"] == {"all": 2.88, "second_half": 2.5}
    assert found["error"] == {"sync": 0.0, "separate_async": 0.045}
    assert found["settings"]["published"] == {"sync": 41.0, "async": 14.8, "ratio": 2.77}
    assert found["cache"] == cache
    runs["sync"]["step_s"] = [3.0] * 4
    cache["3.6"]["faster"] = 1.5
    file.write_text(json.dumps(runs))
    assert main(["--measured", str(file), "--steps", "2"]) == 1
    said = capsys.readouterr().err
    assert "the prediction for sync is 17% off" in said
    assert "at 3.6 times the cache a step is 1.5 times as fast, at least 1.6" in said


def test_the_shared_engine_is_as_much_slower_as_sync_is() -> None:
    from benchmarks.async_sim import shared_engine

    # 3.5 tokens of the prompt, 28 / 2 = 14 sampled ones, and 0.7 x (128 - 14) = 79.8 reserved: 16384 / 97.3 = 168.4.
    sync = {"call_tokens": 28.0, "decode_s": 0.04, "decode_s_each": 0.001, "prefill_s": 0.012}
    # Apart, 64 requests take a step of 0.052 s, half of the 0.104 s in `sync`; prefilling takes a third.
    speed = {"step_s": {"64": 0.052}, "prefill_s": {"64": 0.004}}
    speed["lines"] = {"step": [0.004, 0.00075], "again": [0.0, 0.005], "pause": [0.1, 0.001]}
    engine, pause_s = shared_engine(sync, speed)
    assert (engine.token_s, engine.token_s_each) == pytest.approx((0.008, 0.0015))
    assert engine.most == 168
    assert engine.prefill_s == pytest.approx(0.015)
    assert pause_s == pytest.approx(3 * (0.1 + 256 * 0.001))


def test_conversations_are_those_of_the_run() -> None:
    from benchmarks.async_sim import conversations
    from benchmarks.async_training import Prompt
    from benchmarks.slow_calculator import latency_s

    run = {"call_tokens": 20.4, "answer_tokens": 9.7, "calls": [[], [0, 2, None]]}
    silent, twice, unended = conversations(Prompt(1, 0.0), run)
    assert (silent.turns, silent.calls_s) == ([10], [])
    assert (twice.turns, twice.calls_s) == ([20, 20, 10], [latency_s(1, 1, 0), latency_s(1, 1, 1)])
    assert (unended.turns, unended.calls_s) == ([20, 10], [latency_s(1, 2, 0)])
    assert len(conversations(Prompt(2, 0.0), run)) == 8


def test_the_inputs_of_the_published_setting() -> None:
    from benchmarks import async_sim_setting as setting

    assert setting.mean_cut(0.0, 1.0, 1e9) == pytest.approx(1.6487, abs=1e-4)  # exp(1/2): nothing is cut
    assert setting.mean_cut(10.0, 0.6, 1.0) == pytest.approx(1.0)  # all is cut
    assert setting.mean_cut(setting.mu_of(20346), 0.6, setting.MOST_TOKENS) == pytest.approx(20346)
    # One answer of 1,488 tokens with half a prompt, on one GPU: 8 x 1.54e9 x 2,000 + 8 x 28 x 1,536 x 2,000**2.
    assert setting.training_s(1, [1488]) == pytest.approx((2.464e13 + 1.376e12) / 346.15e12, rel=1e-3)
    # A context of 512 + 1,000/2 = 1,012 tokens of 28,672 bytes each.
    engine = setting.engine_of(2, [1000])
    assert engine.token_s == pytest.approx(0.003313, abs=1e-6)
    assert engine.token_s_each == pytest.approx(1012 * 28672 / 2.345e12 / 2)
