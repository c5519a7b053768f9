"""Failures by the rules of `benchmarks.cache`; no engine runs."""

from benchmarks.cache import LEAST, WHOLE, failures


def test_a_conversation_of_the_benchmark() -> None:
    assert (WHOLE, LEAST) == (558, 501)


def test_what_fails() -> None:
    held = {"over_minimal": 1.2, "prefill_cpu_s": 4.0}
    good = {"plain": {"prefill_cpu_s": 8.0}, "held": held, "latest": 1.5}
    result = {"siblings": {"200": {"led": 1.0}}, "need": {"3.5": good}, "below": {"held_s": 0.0}}
    assert failures(result) == []
    bad = {"plain": {"prefill_cpu_s": 7.0}, "held": {**held, "over_minimal": 1.31}, "latest": 2.1}
    result = {"siblings": {"200": {"led": 1.06}}, "need": {"3.5": bad}, "below": {"held_s": 0.1}}
    assert failures(result) == [
        "siblings with a prompt of 200 read 1.06 of the least, at most 1.05",
        "need 3.5: 1.31 of the least is read, at most 1.3",
        "need 3.5: 4.0 s of prefill, of 7.0",
        "need 3.5: a conversation ends 2.1 times as late, at most 2.0",
        "turns were held although the cache suffices",
    ]
