"""The figures of `benchmarks.attention`, from rounds with known times; no engine runs."""

from benchmarks.attention import figures


def answer(slower: float, difference: float) -> dict[str, object]:
    native = {"prefill": [[80 * slower, 90 * slower]], "decode": [[20 * slower, 22 * slower], [22 * slower, 20]]}
    ours = {"prefill": [[20 * slower, 20]], "decode": [[7, 8], [7, 8]]}
    return {"difference": difference, "times": {"native": native, "ours": ours}}


def test_medians_by_what_was_measured() -> None:
    rounds = [("1", 32, answer(1.0, 1e-7)), ("1", 32, answer(3.0, 3e-7)), ("1", 32, answer(1.0, 2e-7))]
    found = figures([*rounds, ("2 passive", 32, answer(2.0, 0.0))])
    assert found["cpu_ms"]["prefill"] == {
        "1": {"32": {"native": 80, "ours": 20}},
        "2 passive": {"32": {"native": 160, "ours": 40}},
    }
    assert found["cpu_ms"]["decode"]["1"] == {"32": {"native": 22, "ours": 7}}  # of 20, 20, 22, 22, 60 and 66
    assert found["wall_ms"]["prefill"]["1"] == {"32": {"native": 90, "ours": 20}}
    assert found["ratio"]["prefill"] == {"1": {"32": 4.0}, "2 passive": {"32": 4.0}}
    assert found["difference"] == 3e-7
