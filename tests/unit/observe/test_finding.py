import pytest

from tests.conftest import ROOT
from verl_multiturn.observe.explain.courses import Course, surely
from verl_multiturn.observe.explain.finding import SYMPTOMS, Finding, examples, level, percent, ranked


def test_alarms_come_first_then_causes_then_what_touches_most() -> None:
    findings = [
        Finding("groups_wrong", "alarm", "", share=0.9),
        Finding("drift", "unknown", ""),
        Finding("calls_late", "alarm", "", share=0.2),
        Finding("calls_fail", "alarm", "", share=0.3),
        Finding("entropy", "note", "", share=1.0),
    ]
    assert [each.symptom for each in ranked(findings)] == [
        "calls_fail",
        "calls_late",
        "groups_wrong",
        "entropy",
        "drift",
    ]


def test_a_finding_has_at_most_three_examples_each_once() -> None:
    assert examples(["a", "a", "b", "c", "d"]) == ("a", "b", "c")
    assert examples([]) == ()


@pytest.mark.parametrize(("share", "kind"), [(0.0, None), (0.02, "note"), (0.0999, "note"), (0.1, "alarm")])
def test_thresholds_belong_to_what_they_begin(share: float, kind: str | None) -> None:
    assert level(share, 0.02, 0.1) == kind


def test_small_shares_have_a_digit_more() -> None:
    assert [percent(share) for share in (0.0123, 0.1, 1.0)] == ["1.2 %", "10 %", "100 %"]


@pytest.mark.parametrize(
    ("hits", "of", "is_service", "kind"),
    [
        ([0, 0, 0, 0], [64] * 4, False, None),
        ([30, 20, 4, 1], [64] * 4, False, "note"),  # the model learned it
        ([30, 20, 4, 1], [64] * 4, True, "alarm"),  # a service was ill for a time
        ([0, 0, 0, 30], [64] * 4, False, "alarm"),
        ([0, 0, 0, 2], [64] * 4, False, "note"),
        ([3, 3, 3, 3], [4] * 4, False, "alarm"),
        ([1, 1, 1, 1], [3] * 4, False, None),  # too few to decide anything
        ([0, 0, 0, 2], [64, 64, 64, 16], False, "note"),  # two of sixteen may be chance
    ],
)
def test_a_course_is_judged_by_its_windows(hits: list[int], of: list[int], is_service: bool, kind: str | None) -> None:
    assert Course(hits, of).kind(0.02, 0.1, is_service) == kind


def test_a_share_of_few_is_surely_less_than_it_is() -> None:
    assert surely(0, 0) == 0.0
    assert round(surely(2, 16), 3) == 0.034
    assert round(surely(200, 1600), 3) == 0.109


def test_each_symptom_has_its_paragraph() -> None:
    page = (ROOT / "docs" / "reference" / "symptoms.md").read_text()
    assert [name for name in SYMPTOMS if f"## `{name}`" not in page] == []
