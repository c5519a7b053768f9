"""The rows that flipped between evaluations, as the page gets them."""

from pathlib import Path

from tests.support.evaluation_samples import MODEL, OTHER, write_evaluation
from tests.support.sample_records import sample_run
from verl_multiturn.observe.documents.documents import Documents


def flips(*folders: Path) -> object:
    documents = Documents(folders)
    documents.refresh()
    return documents.run()["flips"]


def test_two_evaluations(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "a", {0: [0.0, 0.0], 5: [1.0, 1.0]})
    second = write_evaluation(tmp_path / "b", {0: [1.0, 1.0], 5: [1.0, 0.0]}, model=OTHER)
    row = {"uid": "0", "data_source": "sums", "dirs": [0, 1], "right": [[0, 2], [2, 2]]}
    assert flips(first, second) == {
        "rows": [row],
        "said": [f"{OTHER} less {MODEL}: +0.250 over 2 rows, of which 2 differ, p 0.8; 1 rows flipped"],
    }
    # The page asks for these conversations by this filter.
    documents = Documents([first, second])
    documents.refresh()
    found = documents.page('uid="0" dir=0,1', "number", False, 0, 64)
    assert [(each["dir"], each["number"], each["score"]) for each in found["rows"]] == [
        (0, 0, 0.0),
        (1, 0, 1.0),
        (0, 1, 0.0),
        (1, 1, 1.0),
    ]


def test_evaluations_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "a", {0: [0.0]})
    found = flips(first, write_evaluation(tmp_path / "b", {0: [1.0]}, reward_digest="22"))
    assert isinstance(found, dict)
    assert found["rows"] == []
    assert "have other reward functions" in found["said"][0]


def test_runs_and_one_evaluation_alone_have_none(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "a", {0: [0.0]})
    (tmp_path / "run").mkdir()
    sample_run(tmp_path / "run" / "records")
    assert flips(first) is None
    assert flips(first, tmp_path / "run") is None
