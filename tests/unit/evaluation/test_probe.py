"""A verdict before reinforcement learning, of made-up results."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.probe import ProbeAdvice, probe, probe_summary, probe_table
from verl_multiturn.evaluation.results import EvaluatedRow, EvaluatedSample, EvaluatedWeights, Evaluation, Results
from verl_multiturn.evaluation.tool_paths import Paths

OFFERED = ("calculator",)
CALLED, NOT, BAD = Paths(OFFERED, OFFERED), Paths(OFFERED), Paths(OFFERED, malformed=True)
NONE = Paths()
Said = tuple[float, Paths]


def results(groups: Sequence[Sequence[Said]], stop: str = "finished") -> Results:
    """Return an evaluation that is over; each conversation has a reward and the ways that it took."""
    rows = tuple(
        EvaluatedRow(
            number,
            f"{number:016x}",
            "sums",
            tuple(_sample(number, sample, *said, stop) for sample, said in enumerate(group)),
        )
        for number, group in enumerate(groups)
    )
    told = Evaluation(recipe="q", model=EvaluatedWeights(path="m", hash="1dd3"), samples=len(groups[0]), rows=len(rows))
    return Results(Path("eval"), told, rows, rows, ())


def _sample(row: int, number: int, score: float, paths: Paths, stop: str) -> EvaluatedSample:
    return EvaluatedSample(
        f"{row}-{number}", row, number, True, stop, score, score > 0, 0, 1, None, 1, 0.0, 1.0, "s", paths
    )


MIXED = [(1.0, CALLED), (0.0, NOT), (0.0, NOT), (0.0, NOT)]
RIGHT, WRONG, GUESSED = [(1.0, CALLED)] * 4, [(0.0, CALLED)] * 4, [(0.0, NOT)] * 4


@pytest.mark.parametrize(
    ("groups", "verdict", "sure"),
    [
        ([MIXED] * 20, ProbeAdvice.GO, True),
        ([MIXED] * 5 + [GUESSED] * 15, ProbeAdvice.GO, False),
        ([RIGHT] * 20, ProbeAdvice.NOTHING_LEFT, False),
        ([RIGHT] * 100, ProbeAdvice.NOTHING_LEFT, True),
        (
            [RIGHT * 2] * 50 + [[*RIGHT, *RIGHT[1:], (0.0, NOT)]] * 12,
            ProbeAdvice.NOTHING_LEFT,
            True,
        ),  # slips are not a signal
        ([GUESSED] * 30, ProbeAdvice.WARM_START, True),
        ([[(0.0, BAD)] * 4] * 30, ProbeAdvice.WARM_START, True),
        ([[(1.0, NOT), (0.0, NOT)]] * 30, ProbeAdvice.WARM_START, True),  # rewards differ, and the tool is never found
        ([[(1.0, NONE), (0.0, NONE)]] * 30, ProbeAdvice.GO, True),  # the rows offer none
        ([[(0.0, NONE), (0.0, NONE)]] * 30, ProbeAdvice.EASIER, True),
        ([WRONG] * 29 + [MIXED], ProbeAdvice.EASIER, True),
        ([RIGHT] * 80 + [WRONG] * 10 + [MIXED] * 10, ProbeAdvice.HARDER, True),
        ([[(0.5, NONE), (0.25, NONE)]] * 30, ProbeAdvice.GO, True),  # graded rewards: all are more than 0, and differ
        ([[(0.5, NONE), (0.5, NONE)]] * 100, ProbeAdvice.NOTHING_LEFT, True),
    ],
)
def test_the_verdict(groups: list[list[Said]], verdict: ProbeAdvice, sure: bool) -> None:
    found = probe(results(groups))
    assert (found.verdict, found.is_sure) == (verdict, sure)


def test_the_figures() -> None:
    found = probe(results([MIXED, MIXED, RIGHT, WRONG, GUESSED, [(0.0, BAD), *GUESSED[1:]]]))
    assert found.histogram == (3, 2, 0, 0, 1)
    assert (found.all_right, found.all_wrong, found.conversations) == (1, 3, 24)
    assert [(path.name, path.conversations, path.right, path.groups) for path in found.paths] == [
        ("no tool", 13, 0, 4),
        ("calculator", 10, 6, 4),
        ("malformed", 1, 0, 1),
    ]
    assert [round(path.share.mean, 4) for path in found.paths] == [0.5417, 0.4167, 0.0417]
    assert (round(found.signal.mean, 4), round(found.taken.mean, 4), found.right.mean) == (0.3333, 0.6667, 0.25)


def test_the_reason_names_figures_and_thresholds() -> None:
    assert probe(results([MIXED] * 20)).why == (
        "1.00 of the groups have rewards that differ (at least 0.2 should), and 1.00 call a tool (at least 0.2 should)"
    )
    assert probe(results([[(0.0, BAD), *GUESSED[1:]]] * 20)).why == (
        "0.00 of the groups call a tool (at least 0.2 should), so that calling is never found to pay, and 0.25 of the "
        "conversations wrote a call that cannot be read"
    )
    assert probe(results([WRONG] * 20, stop="response_length")).why.endswith(
        "; 1.00 were cut by a limit, mostly response_length (0.25 is many): look at it first"
    )


def test_a_tool_that_is_never_called_is_named_beside_one_that_is() -> None:
    two = ("calculator", "search")
    found = probe(results([[(1.0, Paths(two, ("calculator",))), (0.0, Paths(two))]] * 20))
    assert found.verdict == "go"
    assert found.why.endswith("; never called: search")


def test_one_sample_is_no_group() -> None:
    with pytest.raises(ConfigError, match="'eval' has one sample of each row, and no group; ask for --samples 8"):
        probe(results([[(1.0, CALLED)]]))


def test_without_a_whole_row_there_is_no_verdict() -> None:
    whole = results([MIXED])
    with pytest.raises(ConfigError, match="'eval' has no whole row"):
        probe(Results(whole.folder, whole.evaluation, whole.rows, (), ()))


def test_the_table_and_the_line() -> None:
    made = results([MIXED] * 5 + [GUESSED] * 15)
    found, file = probe(made), io.StringIO()
    Console(width=120, file=file).print(probe_table(made, found), highlight=False)
    text = file.getvalue()
    for line in ("groups by right of 4: 0:15 1:5", "without: 0 all right, 15 others", "more rows would make it sure"):
        assert line in text
    told = probe_summary(made, found)
    assert (told["verdict"], told["sure"], told["rows"], told["histogram"]) == ("go", False, 20, [15, 5, 0, 0, 0])
    assert told["thresholds"] == {"groups": 0.2, "right": 0.95, "cut": 0.25}
