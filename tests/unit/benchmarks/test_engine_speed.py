"""The figures of `benchmarks.engine_speed`, from rounds with known times; no engine runs."""

import pytest

from benchmarks.engine_speed import CALL_TOKENS, Round, Spent, figures, line


def round_of(requests: int, slower: float = 1.0, left: int = 11, again_s: float = 0.006) -> Round:
    """Return a round: prefilling 4 ms a request, a step 1 ms and 0.5 ms a request; other work makes it `slower`."""
    step_s = 0.001 + 0.0005 * requests
    first_s = 0.004 * requests
    seconds = (first_s, first_s + (CALL_TOKENS - 1) * step_s, 0.05 + 0.001 * requests)
    rest_s = again_s * requests + (left - 1) * step_s
    first, whole, pause, rest = (Spent(slower * second, 2 * second) for second in (*seconds, rest_s))
    return Round(first, whole, pause, rest, [left] * requests, 200 * requests)


def test_the_shortest_times_count() -> None:
    passes = [{n: round_of(n, slower) for n in (16, 64)} for slower in (3.0, 1.0, 1.5)]
    found = figures(passes)
    assert found["prefill_s"] == {"16": 0.004, "64": 0.004}
    assert found["step_s"] == {"16": 0.009, "64": 0.033}
    assert found["again_s"] == {"16": 0.006, "64": 0.006}
    assert found["pause_s"] == {"16": 0.066, "64": 0.114}
    assert found["prefill_tokens_per_s"] == {"16": 50_000, "64": 50_000}
    assert found["again_tokens_per_s"] == {"16": 36_000, "64": 36_000}  # 200 and the 16 tokens of before the pause
    assert found["decode_tokens_per_s"]["64"] == 1939
    assert found["cores"] == {"16": 2.0, "64": 2.0}
    assert found["lines"] == {
        "prefill": pytest.approx([0, 0.004]),
        "step": pytest.approx([0.001, 0.0005]),
        "again": pytest.approx([0, 0.006]),
        "pause": pytest.approx([0.05, 0.001]),
    }


def test_a_pause_before_or_after_decoding_measures_no_prefilling() -> None:
    early, late = round_of(16, left=CALL_TOKENS, again_s=0.001), round_of(16, again_s=0.001)
    late = late._replace(left=[0, *late.left[1:]])  # one request had ended
    assert not early.is_cut
    assert not late.is_cut
    assert figures([{16: early}, {16: late}, {16: round_of(16)}])["again_s"] == {"16": 0.006}
    with pytest.raises(SystemExit, match="no pass interrupted 16 requests"):
        figures([{16: early}, {16: late}])


def test_a_line_takes_no_time_back() -> None:
    assert line([10, 20], [1.5, 2.5]) == [0.5, 0.1]
    assert line([10, 20], [0.5, 2.0]) == [0.0, 0.09]  # through 0: (10 x 0.5 + 20 x 2) / (100 + 400)
    assert line([64], [6.4]) == [0.0, 0.1]
