"""`scripts/names.py` finds the class names that are used more than once."""

from pathlib import Path

from scripts.names import doubles, is_public


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
