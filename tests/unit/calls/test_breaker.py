"""The breaker of outages: when it opens, whom it judges, and how it closes. Its times are the tests' own."""

from __future__ import annotations

from math import inf

import pytest

from verl_multiturn.calls.outages.breaker import GOOD_PROBES, LEAST_CALLS, MISTAKEN_PROBES, Breaker, Outage


def fail(breaker: Breaker, now: float, conversations: str, epoch: int = 0, answered: int = 0) -> list[str]:
    """Report an outage for each letter, which names a conversation, after so many answered calls."""
    return breaker.report(now, answered, [Outage(each, epoch) for each in conversations])


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    fail(breaker, now, "abababab")
    assert breaker.is_open
    return breaker


def probe(breaker: Breaker, now: float, good: bool | None) -> None:
    assert breaker.next_probe_s(now) == 0
    breaker.begin_probe(now, "p", 100)
    assert breaker.end_probe(now, "p", good)


def test_one_late_call_of_a_healthy_run_judges_nobody() -> None:
    breaker = Breaker()
    for second in range(100):
        assert fail(breaker, second, "a" if second == 50 else "", answered=5) == []
    assert not breaker.is_open
    assert breaker.unjudged() == []


def test_it_opens_at_half_of_the_calls_of_the_window() -> None:
    breaker = Breaker()
    assert fail(breaker, 0, "ab", answered=4) == []
    assert fail(breaker, 5, "c") == []  # 3 of 7
    assert fail(breaker, 6, "d") == ["a", "b", "c", "d"]  # 4 of 8
    assert (breaker.is_open, breaker.trips, breaker.opened_at) == (True, 1, 6)


def test_calls_older_than_the_window_count_no_more() -> None:
    breaker = Breaker()
    fail(breaker, 0, "", answered=100)
    fail(breaker, 29, "abcd", answered=4)
    assert not breaker.is_open  # 4 of 108
    assert fail(breaker, 31, "e") == ["a", "b", "c", "d", "e"]  # 5 of 9


def test_eight_outages_in_a_row_open_it_however_many_calls_went_well_before() -> None:
    breaker = Breaker()
    fail(breaker, 0, "z", answered=1_000)
    fail(breaker, 1, "abcabc", answered=1)
    assert fail(breaker, 2, "a") == []
    assert fail(breaker, 2, "b") == ["z", "a", "b", "c", "a", "b", "c", "a", "b"]


def test_mistakes_that_may_not_have_reached_the_service_hide_no_outage() -> None:
    breaker = Breaker()
    for second in range(3):  # 2 of 5 calls: the others never reach it
        assert breaker.report(second, 0, [Outage("ab"[second % 2], 0)], mistakes=2) == []
    assert breaker.report(3, 0, [Outage("b", 0)], mistakes=2) == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("outage", "answered"), [(0.1, 0.0), (0.1, 0.02), (0.2, 0.1)])
def test_single_failures_beside_many_mistakes_open_nothing(outage: float, answered: float) -> None:
    import random

    draw, breaker = random.Random(0), Breaker()
    for call in range(20_000):
        drawn = draw.random()
        failed = [Outage(str(call), 0)] if drawn < outage else []
        is_answered = not failed and drawn < outage + answered
        assert breaker.report(call / 5, int(is_answered), failed, mistakes=int(not failed and not is_answered)) == []


def test_what_the_service_has_answered_since_says_that_it_is_there() -> None:
    breaker = Breaker()
    fail(breaker, 0, "ab")
    assert breaker.unjudged() == ["a", "b"]
    breaker.report(1, 0, mistakes=1)
    assert breaker.unjudged() == []


def test_a_service_that_tells_of_mistakes_is_there() -> None:
    breaker = Breaker()
    for second in range(100):
        assert breaker.report(second, 0, [Outage("ab"[second % 2], 0)], mistakes=4) == []


def test_a_probe_by_which_the_model_made_a_mistake_says_nothing() -> None:
    breaker = opened()
    for now in range(1, 30):
        for _ in range(MISTAKEN_PROBES - 1):
            assert breaker.next_probe_s(5 * now) == 0, "the next one follows at once"
            breaker.begin_probe(5 * now, "p", 100)
            assert breaker.end_probe(5 * now, "p", None, mistaken=True)
        assert breaker.report(5 * now, 0, mistakes=50) == [], "calls that began before"
        probe(breaker, 5 * now, False)
        assert breaker.is_open
    for _ in range(MISTAKEN_PROBES):
        assert breaker.is_open
        breaker.begin_probe(1_000, "q", 100, has_failed=True)
        assert breaker.end_probe(1_000, "q", False), "a call that fails once more: it may be its own doing"
        breaker.begin_probe(1_000, "p", 100)
        assert breaker.end_probe(1_000, "p", None, mistaken=True)
    assert not breaker.is_open, "so many in a row the service has answered"


def test_fewer_calls_than_eight_in_the_window_are_judged_with_older_ones() -> None:
    breaker = Breaker()
    judged = [fail(breaker, 60.0 * minute, "ab") for minute in range(4)]
    assert [bool(each) for each in judged] == [False, False, False, True]

    breaker = Breaker()
    for hour in range(20):  # too old to count together
        assert fail(breaker, 3_600.0 * hour, "ab", answered=1) == []


@pytest.mark.parametrize("apart_s", [86_400.0 * 10, 3_600.0, 53 * 60 / 7, 301 / 7])
def test_eight_outages_that_lie_far_apart_open_nothing(apart_s: float) -> None:
    breaker = Breaker()
    for number in range(64):
        assert fail(breaker, number * apart_s, "ab"[number % 2]) == []
    assert not breaker.is_open
    assert breaker.unjudged(), "nobody knows that the service is there"


def test_eight_outages_within_five_minutes_open_it_after_any_number_of_older_ones() -> None:
    breaker = Breaker()
    for day in range(20):
        assert fail(breaker, 86_400.0 * day, "ab"[day % 2]) == []
    judged = [fail(breaker, 86_400.0 * 20 + 42 * number, "cd"[number % 2]) for number in range(8)]
    assert judged == [[]] * 7 + [list("cdcdcdcd")]


def test_one_conversation_opens_nothing_beside_another_of_yesterday() -> None:
    breaker = Breaker()
    assert fail(breaker, 0, "b") == []
    assert fail(breaker, 86_400, "a" * 50) == []


def test_one_conversation_alone_opens_nothing() -> None:
    breaker = Breaker()
    assert fail(breaker, 0, "a" * 50) == []
    assert fail(breaker, 1, "b") != []


def test_single_failures_of_a_tenth_open_nothing() -> None:
    import random

    for seed in range(20):
        breaker, chance = Breaker(), random.Random(seed)
        breaker.report(0, 20)
        for call in range(5_000):
            is_outage = chance.random() < 0.1
            outages = [Outage(f"c{chance.randrange(64)}", breaker.epoch)] if is_outage else []
            breaker.report(call / 20, not is_outage, outages)
        assert breaker.trips == 0


def test_what_comes_while_it_is_open_is_judged() -> None:
    breaker = opened()
    assert fail(breaker, 1, "x", answered=10) == ["x"]
    assert breaker.is_open  # calls that are not probes close nothing


def test_probes_follow_after_1_2_4_and_then_every_5_seconds() -> None:
    breaker, now, waits = opened(10.0), 10.0, []
    for _ in range(6):
        waits.append(breaker.next_probe_s(now))
        now += waits[-1]
        probe(breaker, now, good=False)
    assert waits == [1, 2, 4, 5, 5, 5]


def test_the_next_probe_follows_when_the_service_wants_to_be_asked_again() -> None:
    breaker = opened(10.0)
    breaker.put_off(10.0, 30.0)
    assert breaker.next_probe_s(10.0) == 30
    probe(breaker, 40.0, good=False)
    assert breaker.next_probe_s(40.0) == 2
    breaker.put_off(40.0, 0.0)
    assert breaker.next_probe_s(40.0) == 1  # never sooner than the first one


def test_three_good_probes_in_a_row_close_it() -> None:
    breaker = opened()
    probe(breaker, 1, good=True)
    probe(breaker, 1, good=True)
    probe(breaker, 1, good=False)
    assert breaker.next_probe_s(1) == 2
    for _ in range(GOOD_PROBES):
        assert breaker.is_open
        probe(breaker, 3, good=True)
    assert (breaker.is_open, breaker.epoch, breaker.next_probe_s(3)) == (False, 2, inf)
    assert (breaker.open_s(9), breaker.open_total_s(9)) == (0, 3)


def test_one_probe_at_a_time_and_one_that_hangs_counts_as_failed() -> None:
    breaker = opened()
    breaker.begin_probe(1, "hangs", 60)
    assert breaker.next_probe_s(2) == 59
    assert breaker.next_probe_s(61) == 2  # failed, so the next follows as after any failed one
    assert not breaker.end_probe(62, "hangs", True)  # its result now comes too late
    assert breaker.next_probe_s(63) == 0


def test_after_a_cancelled_probe_the_next_one_follows_at_once() -> None:
    breaker = opened()
    probe(breaker, 1, good=True)
    probe(breaker, 1, good=None)
    probe(breaker, 1, good=True)
    probe(breaker, 1, good=True)
    assert not breaker.is_open


def test_calls_that_began_before_the_last_change_are_judged_and_open_nothing() -> None:
    breaker = opened()
    for _ in range(GOOD_PROBES):
        probe(breaker, 1, good=True)
    assert fail(breaker, 2, "uvwxuvwxuvwx", epoch=0) == list("uvwxuvwxuvwx")
    assert not breaker.is_open
    assert fail(breaker, 3, "a", epoch=2) == []


def test_flapping_every_five_seconds_opens_it_each_time() -> None:
    breaker, now = Breaker(), 0.0
    for cycle in range(1, 6):
        breaker.report(now, 200)
        fail(breaker, now + 5, "abcdefgh", breaker.epoch)
        assert breaker.trips == cycle
        now += 10
        for _ in range(GOOD_PROBES):
            probe(breaker, now, good=True)
    assert breaker.open_total_s(now) == 5 * 5


def test_the_last_calls_of_a_step_are_not_yet_judged() -> None:
    breaker = Breaker()
    fail(breaker, 0, "", answered=500)
    fail(breaker, 1, "ab")
    assert breaker.unjudged() == ["a", "b"]
    fail(breaker, 2, "", answered=1)
    assert breaker.unjudged() == []
    fail(breaker, 3, "a")
    assert breaker.unjudged() == []  # one call is not enough


def test_a_newer_epoch_is_taken_over_and_an_older_one_is_not() -> None:
    breaker = Breaker()
    assert breaker.recall(5, 3)
    assert (breaker.is_open, breaker.opened_at, breaker.next_probe_s(5)) == (True, 5, 1)
    assert not breaker.recall(6, 3)
    assert not breaker.recall(6, 2)
    assert breaker.recall(6, 4)
    assert (breaker.is_open, breaker.open_total_s(9)) == (False, 1)


@pytest.mark.parametrize("calls", range(1, LEAST_CALLS))
def test_fewer_than_eight_calls_say_nothing(calls: int) -> None:
    breaker = Breaker()
    assert fail(breaker, 0, "abcdefgh"[:calls]) == []
    assert not breaker.is_open


def test_as_many_outages_are_needed_as_calls_run_beside_them() -> None:
    breaker = Breaker()
    outages = [Outage(each, 0) for each in "abcdefgh"]
    assert breaker.report(0, 0, outages, process="p", beside=9) == []
    assert breaker.report(0, 0, outages[:1], process="q", beside=9) == []  # 9 of 27
    assert breaker.report(0, 0, outages[:1], process="p", beside=1) == list("abcdefghaa")  # 10 of 20

    breaker = Breaker()
    breaker.report(0, 0, outages, process="dead", beside=100)
    assert breaker.report(29, 0, outages[:1]) == []
    assert breaker.report(31, 0, outages)  # no worker has reported for 30 s that they still run


def test_calls_that_were_cut_off_are_judged_and_not_counted() -> None:
    breaker = Breaker()
    assert breaker.report(0, 0, hung=[Outage(f"{each}", 0) for each in range(20)]) == []
    assert not breaker.is_open
    assert fail(breaker, 1, "abababab") == [*(f"{each}" for each in range(20)), *"abababab"]
    assert breaker.report(2, 0, hung=[Outage("late", 1)]) == ["late"]


def test_a_call_that_fails_as_a_probe_once_more_leaves_the_good_ones_counted() -> None:
    breaker = opened()
    probe(breaker, 1, good=True)
    probe(breaker, 1, good=True)
    breaker.begin_probe(1, "p", 100, has_failed=True)
    assert breaker.end_probe(1, "p", False)
    assert breaker.next_probe_s(1) == 2
    probe(breaker, 3, good=True)
    assert not breaker.is_open


def test_a_probe_that_was_told_good_and_then_met_an_outage_is_taken_back() -> None:
    breaker = opened()
    for _ in range(2):
        probe(breaker, 1, good=True)
    breaker.take_back([Outage("began before it opened", 0)])
    breaker.take_back([Outage("was a probe", 1)])
    for _ in range(GOOD_PROBES):
        assert breaker.is_open
        probe(breaker, 3, good=True)
    assert not breaker.is_open
    breaker.take_back([Outage("of the outage before", 1)])
    assert not breaker.is_open


def test_who_knows_the_epoch_knows_for_how_long_it_was_open() -> None:
    breaker = Breaker()
    assert breaker.recall(100, 3, 40)
    assert not breaker.recall(101, 3, 60)
    assert not breaker.recall(101, 3, 5)
    assert breaker.open_s(101) == 60
