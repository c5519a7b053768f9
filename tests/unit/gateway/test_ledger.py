"""The ledger of `benchmarks.gateway` sees each fault that it is there for."""

from pathlib import Path

from tests.long.endpoint.gateway_ledger import Ledger, RewardName
from tests.support.gateway_samples import GatewaySamples

LAST = RewardName("one", None, "a")


def written(folder: Path, rewards: int = 1, ends: int = 1) -> Ledger:
    samples = GatewaySamples(folder)
    samples.begin("one")
    record = {}
    for _ in range(ends):
        record = samples.end("one")
    for _ in range(rewards):
        samples.write("reward", "one", generation=None, reward=0.5, id="a")
    samples.close()
    ledger = Ledger()
    ledger.end("one", len(record.get("generations", ())))
    ledger.reward(LAST, 0.5, is_acknowledged=True)
    return ledger


def test_what_was_acknowledged_is_there_once(tmp_path: Path) -> None:
    assert written(tmp_path).compare(tmp_path).figures == {"lost": 0, "twice": 0, "unknown": 0}


def test_a_repeated_line_counts_once(tmp_path: Path) -> None:
    assert written(tmp_path, rewards=2).compare(tmp_path).figures == {"lost": 0, "twice": 0, "unknown": 0}


def test_a_reward_that_is_gone(tmp_path: Path) -> None:
    assert written(tmp_path, rewards=0).compare(tmp_path).lost == [f"{LAST}: 0.5 was acknowledged, and None is there"]


def test_a_record_that_is_there_twice(tmp_path: Path) -> None:
    found = written(tmp_path, ends=2).compare(tmp_path)
    assert found.twice == ["session one has 2 records", "session one has 2 ends"]


def test_a_session_that_is_gone(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    ledger.end("two", 1)
    assert ledger.compare(tmp_path).lost == [
        "session two ended, and has no record",
        "session two ended, and has no line of its end",
    ]


def test_a_torn_record_of_an_acknowledged_end(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    (path,) = tmp_path.glob("*.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-9])
    assert "session one ended, and has no record" in ledger.compare(tmp_path).lost


def test_a_reward_in_doubt_may_count_or_not(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    ledger.doubtful[LAST] = ledger.rewarded.pop(LAST)
    ledger.reward(RewardName("one", None, "b"), 0.25, is_acknowledged=False)
    assert ledger.compare(tmp_path).figures == {"lost": 0, "twice": 0, "unknown": 0}


def test_a_reward_that_nobody_sent(tmp_path: Path) -> None:
    ledger = written(tmp_path)
    ledger.rewarded.clear()
    assert len(ledger.compare(tmp_path).unknown) == 1
