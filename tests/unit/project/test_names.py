"""`scripts/names.py` finds the class names that are used more than once."""

from pathlib import Path

from scripts.names import doubles, is_public

SAME_IDEA = {
    "Generation": "what an engine returns, and the same in a record",
    "Reply": "what a user or an environment answers, and the same in a record",
    "SessionRequest": "a request of an agent, and the same in a record",
    "Span": "a stretch of a conversation's time, and the same in a record",
}
"""Public names of two classes, each with the reason: one idea in two protocols."""
PROTOCOLS = "proxy/protocols/"
"""Each protocol of agents has models of its own for one idea (`_Message`, `_Tool`)."""


def test_names_of_two_classes_are_found(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "a.py").write_text("class Row: ...\nclass _Row: ...\nclass Turn:\n    class Part: ...\n")
    (tmp_path / "tools" / "b.py").write_text("def make():\n    class Turn: ...\nclass Part: ...\nclass Once: ...\n")
    found = doubles(tmp_path)
    assert found == {
        "Part": [("a.py", "Part"), ("tools/b.py", "Part")],
        "Row": [("a.py", "Row"), ("a.py", "_Row")],
        "Turn": [("a.py", "Turn"), ("tools/b.py", "Turn")],
    }
    assert [name for name, places in found.items() if is_public(places)] == ["Part", "Turn"]


def test_a_public_class_name_is_used_once() -> None:
    twice = {name: places for name, places in doubles().items() if is_public(places)}
    new = {name: places for name, places in twice.items() if name not in SAME_IDEA}
    assert not new, f"{new}: rename the one that is known less; one idea in two protocols goes into SAME_IDEA"
    assert twice.keys() == SAME_IDEA.keys(), "take a name that is used once out of SAME_IDEA"


def test_a_private_class_name_is_used_twice_in_the_protocols_alone() -> None:
    new = {
        name: places
        for name, places in doubles().items()
        if name not in SAME_IDEA and not all(file.startswith(PROTOCOLS) for file, _ in places)
    }
    assert not new, f"{new}: rename one of them; an underscore does not make two ideas one"
