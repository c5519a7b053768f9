"""Estimates against truths of others: enumeration, closed forms in literals, SciPy."""

import math
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from verl_multiturn.evaluation.estimates import (
    effective_rows,
    estimate,
    gain,
    is_share,
    paired,
    pass_at_k,
    varied,
    wilson,
)
from verl_multiturn.evaluation.student_t import t_quantile, two_sided_p


def test_pass_at_k_is_the_share_of_choices_with_a_pass() -> None:
    assert pass_at_k(4, 1, 2) == 0.5
    for samples in range(1, 9):
        for passed in range(samples + 1):
            for k in range(1, samples + 1):
                choices = [any(choice) for choice in combinations([i < passed for i in range(samples)], k)]
                assert pass_at_k(samples, passed, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_numbers_that_do_not_fit(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= passed <= samples"):
        pass_at_k(samples, passed, k)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_unbiased(p: float, k: int) -> None:
    n = 5
    expected = sum(
        math.prod(p if right else 1 - p for right in each) * pass_at_k(n, sum(each), k)
        for each in product([True, False], repeat=n)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


# Newcombe (Statistics in Medicine 17, 1998), table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_the_published_one(right: int, n: int, low: float, high: float) -> None:
    found = wilson(right / n, n, 1.959964)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    other = wilson(1 - right / n, n, 1.959964)
    assert (round(other.low, 4), round(other.high, 4)) == (round(1 - high, 4), round(1 - low, 4))


def test_students_t_is_scipys() -> None:
    for degrees in (1, 2, 3, 5, 10, 29, 127, 511, 10_000):
        for t in (0.01, 0.3, 1.0, 1.96, 3.0, 10.0, 30.0):
            assert two_sided_p(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), rel=1e-9)
            assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)
        for confidence in (0.9, 0.95, 0.99):
            wanted = stats.t.ppf((1 + confidence) / 2, degrees)
            assert t_quantile(confidence, degrees) == pytest.approx(wanted, rel=1e-9)
    assert two_sided_p(0.0, 3) == 1.0
    assert two_sided_p(math.inf, 3) == 0.0


def test_a_share_counts_as_many_answers_as_vary_as_much() -> None:
    # 4 rows of 8: mean 0.5, variance 5/48, so 0.25 * 4 / (5/48) = 9.6 answers of the 32.
    values = [0.125, 0.375, 0.625, 0.875]
    assert effective_rows(values, 32) == pytest.approx(0.25 * 4 / (5 / 48))
    found = estimate(values, 32)
    assert found is not None
    assert found.mean == 0.5
    assert found.interval == wilson(0.5, 0.25 * 4 / (5 / 48), t_quantile(0.95, 3))


def test_rows_that_are_all_right_or_all_wrong_have_a_width() -> None:
    for value in (0.0, 1.0):
        found = estimate([value] * 64, 512)
        assert found is not None
        assert found.interval is not None
        width = found.interval.high - found.interval.low
        assert round(width, 4) == round(1.998341**2 / (64 + 1.998341**2), 4) == 0.0587


def test_no_more_answers_count_than_there_are_samples() -> None:
    assert effective_rows([0.5, 0.5625, 0.5, 0.5625] * 8, 256) == 256  # the rows are nearly equal by chance
    assert effective_rows([0.5], 8) == 1  # nothing shows how another row would do


@pytest.mark.parametrize(
    ("values", "answers"),
    [([1.0] * 5, 5), ([0.5] * 5, 5), ([0.1] * 5, 5), ([1.0] * 4 + [0.99], 10), ([0.5, 0.5, 0.5 + 1e-12], 3)],
)
def test_rows_that_are_nearly_alike_say_little_more_than_rows_that_are(values: list[float], answers: float) -> None:
    assert effective_rows(values, 8 * len(values)) == answers


@pytest.mark.parametrize(
    ("values", "count"),
    [([], 0), ([5.0], 1), ([5.0] * 3, 1), ([5.0, 5.0, 5.01], 2), ([1.0, 2.0, 3.0, 4.0], 4), ([0.1 + 0.2, 0.3], 1),
     ([1e12, 1e12 + 1e-3], 1), ([0.0, -0.0], 1), ([1.0, 2.0] * 4, 5)],
)  # fmt: skip
def test_values_that_tell_a_spread(values: list[float], count: int) -> None:
    assert varied(values) == count


def test_what_is_no_share_has_the_interval_of_students_t() -> None:
    values = [-1.0, 0.0, 2.0, 3.0, -2.0, 4.0, -3.0, 5.0]
    assert not is_share(values)
    found = estimate(values, 8, share=False)
    assert found is not None
    low, high = stats.t.interval(0.95, 7, loc=1.0, scale=stats.sem(values))
    assert found.interval == pytest.approx((low, high))
    assert found.no_interval == ""


FEW = "rows that differ: {}; an interval of rewards outside [0, 1] needs 8"


@pytest.mark.parametrize(
    ("values", "count"),
    [([2.0], 1), ([2.0, 3.0], 2), ([2.0] * 128, 1), ([2.0] * 127 + [3.0], 2), ([float(v) for v in range(7)], 7)],
)
def test_few_rows_that_are_no_shares_have_no_interval(values: list[float], count: int) -> None:
    found = estimate(values, 8, share=False)
    assert found is not None
    assert found[1:] == (None, len(values), FEW.format(count))


def test_rewards_too_large_for_a_square_have_no_interval() -> None:
    far = [1e200 * number for number in range(9)]
    one, two = estimate(far, 9, share=False), paired([0.0] * 9, far, share=False)
    assert one is not None
    assert two is not None
    assert one.no_interval == two.no_interval == "the rewards are too large for a float's square"
    assert two.p == 1.0


def test_nothing_is_estimated_of_nothing() -> None:
    assert estimate([], 8) is None
    assert paired([], []) is None


def test_a_comparison_is_a_paired_t_test() -> None:
    first, second = [0.0, 0.25, 0.5, 0.5, 0.75, 1.0] * 3, [0.25, 0.25, 0.75, 0.25, 1.0, 1.0] * 3
    found, wanted = paired(first, second), stats.ttest_rel(second, first)
    assert found is not None
    assert found.p == pytest.approx(wanted.pvalue)
    assert found.mean == pytest.approx(1 / 12)
    assert found.interval is not None
    assert (found.interval.high - found.interval.low) / 2 == pytest.approx(
        0.1983, abs=5e-5
    )  # t^2 / (18 + t^2), t = 2.1098
    scaled = paired([9 * each for each in first], [9 * each for each in second], share=False)
    assert scaled is not None
    low, high = wanted.confidence_interval(0.95)
    assert scaled.interval == pytest.approx((9 * low, 9 * high))


def test_a_difference_of_shares_is_no_larger_than_one() -> None:
    found = paired([0.0] * 9 + [1.0], [1.0] * 10)
    assert found is not None
    assert found.interval == pytest.approx((0.5615, 1.0), abs=5e-5)  # 0.9 - t^2 / (10 + t^2), t = 2.2622
    assert (found.p, found.differ) == (2**-8, 9)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        ([0.0] * 5, [1, 1, 1, 1, 0.99], 2**-4),
        ([0.0] * 3, [0.9, 0.9, 0.91], 2**-2),
        ([0.0] * 2, [1, 0.999], 2**-1),
        ([0.0], [1.0], 1.0),
        ([0.0] * 9, [0.5] * 8 + [0.5001], 2**-8),
        ([0.0] * 128, [0.0] * 127 + [1.0], 1.0),
        ([0.0] * 128, [0.0] * 126 + [1.0, 0.99], 0.5),
        ([0.3] * 64, [0.1 + 0.2] * 64, 1.0),
    ],
)
def test_p_is_at_least_that_of_the_signs(first: list[float], second: list[float], p: float) -> None:
    for share, scale in ((True, 1.0), (False, 1e6)):
        found = paired([scale * each for each in first], [scale * each for each in second], share=share)
        assert found is not None
        assert found.p == p


def test_rows_that_gain_nearly_the_same_have_wilsons_width() -> None:
    nearly, equal = paired([0.0] * 5, [1, 1, 1, 1, 0.99]), paired([0.0] * 5, [1.0] * 5)
    assert nearly is not None
    assert equal is not None
    assert nearly.interval == pytest.approx((0.998 - 0.6066, 1.0), abs=5e-5)  # t^2 / (5 + t^2), t = 2.7764
    assert equal.interval == pytest.approx((1.0 - 0.6066, 1.0), abs=5e-5)


@pytest.mark.parametrize(
    ("gains", "count"),
    [([9.0], 1), ([9.0, 9.1], 2), ([9.0] * 64, 1), ([0.0] * 60 + [9.0, 8.0, 7.0, 6.0], 4), ([9.0] * 20 + [8.0], 2),
     ([0.0] * 9 + [float(v) for v in range(1, 8)], 7)],
)  # fmt: skip
def test_few_rows_that_differ_and_are_no_shares_have_no_interval(gains: list[float], count: int) -> None:
    found = paired([0.0] * len(gains), gains, share=False)
    assert found is not None
    assert (found.interval, found.no_interval) == (None, FEW.format(count))


def test_eight_rows_that_differ_have_an_interval() -> None:
    found = paired([0.0] * 12, [0.0] * 4 + [float(v) for v in range(1, 9)], share=False)
    assert found is not None
    assert found.interval is not None
    assert found.no_interval == ""


def test_what_differs_by_rounding_alone_does_not_differ() -> None:
    assert gain(0.1 + 0.2, 0.3) == gain(1e12, 1e12 + 1e-4) == 0.0
    assert gain(0.0, 1e-6) == 1e-6


def test_models_that_do_the_same_are_not_proven_equal() -> None:
    found = paired([0.0, 1.0, 1.0, 0.0] * 8, [0.0, 1.0, 1.0, 0.0] * 8)
    assert found is not None
    assert (found.mean, found.p, found.rows, found.differ) == (0.0, 1.0, 32, 0)
    assert found.interval == pytest.approx((-0.1150, 0.1150), abs=5e-5)  # t^2 / (32 + t^2), t = 2.0395
    scaled = paired([5.0, 7.0], [5.0, 7.0], share=False)
    assert scaled is not None
    assert scaled.interval is None


def test_rows_that_all_gain_the_same_have_the_p_of_their_signs() -> None:
    found = paired([0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.5, 0.6])  # the last digits differ
    assert found is not None
    assert (round(found.mean, 12), found.p) == (0.2, 0.125)
    assert found.interval is not None
    assert found.interval.low < 0.0 < found.interval.high


shares = st.lists(st.sampled_from([i / 8 for i in range(9)]), min_size=1, max_size=40)


@given(shares)
def test_an_interval_holds_the_mean_and_lies_among_shares(values: list[float]) -> None:
    found = estimate(values, 8 * len(values))
    assert found is not None
    assert found.interval is not None
    assert 0.0 <= found.interval.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.interval.high <= 1.0
    assert found.interval.high - found.interval.low > 0.001
    mirrored = estimate([1 - value for value in values], 8 * len(values))
    assert mirrored is not None
    assert mirrored.interval == pytest.approx((1 - found.interval.high, 1 - found.interval.low), abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=30))
def test_p_and_interval_of_a_comparison_agree(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found, back = paired(first, second), paired(second, first)
    assert found is not None
    assert back is not None
    assert (back.mean, back.p) == (pytest.approx(-found.mean), pytest.approx(found.p))
    assert found.interval is not None
    assert found.p >= min(1.0, 2.0 ** (1 - sum(a != b for a, b in pairs)))
    least = wilson(0.0, len(pairs), t_quantile(0.95, len(pairs) - 1)).high
    assert found.interval.high == 1.0 or found.interval.high - found.mean >= least - 1e-12
    assert found.interval.low == -1.0 or found.mean - found.interval.low >= least - 1e-12
    scaled = paired([9 * each for each in first], [9 * each for each in second], share=False)
    assert scaled is not None
    assert scaled.p == pytest.approx(found.p)
