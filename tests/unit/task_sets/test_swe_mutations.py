"""Mutations of Python source: where they are, their texts, and in which order they are drawn."""

import ast

import pytest

from verl_multiturn.task_sets.swe.mutations import Mutation, drawn_mutations, is_sound, mutations_of

SOURCE = b'''"""A module; 1 < 2."""
LIMIT = 3


class Box:
    size = 1 + 1

    def fits(self, a: "int < 3", other=0, *, key=True) -> "a < b":
        """Tell; a < b."""
        return (a) < other and not a != -2  # a < b
'''


def changed(source: str) -> list[tuple[str, str]]:
    """Return for each sound mutation of a function's body its kind and the body's mutated text."""
    head = "def f(a, b):\n    "
    text = (head + source + "\n").encode()
    found = [each for each in mutations_of("m.py", text) if is_sound(each, text)]
    return [(each.kind, each.apply(text).decode().removeprefix(head).rstrip()) for each in found]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("return a < b <= a", [("comparison", "return a <= b <= a"), ("comparison", "return a < b < a")]),
        ("return a is not b", [("comparison", "return a is b")]),
        ("return a not  in b", [("comparison", "return a in b")]),
        ("return (a  # a < b\n    ) == (b)", [("comparison", "return (a  # a < b\n    ) != (b)")]),
        ("return a + b * a", [("arithmetic", "return a - b * a"), ("arithmetic", "return a + b + a")]),
        ("return '%s' % a", []),
        ("a //= b", [("arithmetic", "a *= b")]),
        ("return a and b or a", [("boolean", "return a or b or a"), ("boolean", "return a and b and a")]),
        ("return not(a)", [("not", "return (a)")]),
        ("return -a", [("sign", "return a")]),
        ("return 0", [("constant", "return 1")]),
        ("return b[2]", [("constant", "return b[1]"), ("constant", "return b[3]")]),
        ("return True", [("constant", "return False")]),
        ("return a if b else None", [("branches", "return None if b else a")]),
        ("return g(a, b)", [("arguments", "return g(b, a)")]),
        ("return g(a, a)", []),
        ("return g(*a, b)", []),
        ("return isinstance(a, b)", []),
        ("return f'{a < b}'", []),
        ("assert a < b", []),
        ('return "ä" == a', [("comparison", 'return "ä" != a')]),
    ],
)
def test_what_a_mutation_writes(source: str, expected: list[tuple[str, str]]) -> None:
    assert changed(source) == expected


def test_only_code_in_functions_is_mutated() -> None:
    found = [(each.kind, each.before, each.after, each.function, each.line) for each in mutations_of("m.py", SOURCE)]
    assert found == [
        ("constant", "0", "1", "Box.fits", 8),
        ("constant", "True", "False", "Box.fits", 8),
        ("comparison", "<", "<=", "Box.fits", 10),
        ("boolean", "and", "or", "Box.fits", 10),
        ("not", "not ", "", "Box.fits", 10),
        ("comparison", "!=", "==", "Box.fits", 10),
        ("sign", "-", "", "Box.fits", 10),
        ("constant", "2", "1", "Box.fits", 10),
        ("constant", "2", "3", "Box.fits", 10),
    ]


def test_a_mutation_changes_its_span_alone() -> None:
    for each in mutations_of("m.py", SOURCE):
        text = each.apply(SOURCE)
        assert text[: each.start] == SOURCE[: each.start]
        assert text[each.start + len(each.after.encode()) :] == SOURCE[each.end :]
        ast.parse(text)


def test_another_version_of_the_file_is_refused() -> None:
    mutation = mutations_of("m.py", SOURCE)[0]
    with pytest.raises(ValueError, match=r"'m\.py' has no '0' at byte"):
        mutation.apply(b"# a new line\n" + SOURCE)


def test_text_that_is_no_python_is_not_sound() -> None:
    source = b"x = not (a\n         == b)\n"
    assert not is_sound(Mutation("m.py", 1, "not", "", 8, 9, "(", ""), source)
    assert not is_sound(Mutation("m.py", 1, "comparison", "", 20, 20, "", " "), source)  # layout alone


def test_the_draw_takes_one_of_each_function_first() -> None:
    text = b"def f(a):\n    return a + 1 + 2 + 3\n\n\ndef g(a):\n    return a < 5\n"
    drawn = list(drawn_mutations({"m.py": text}, seed=0))
    assert {each.function for each in drawn[:2]} == {"f", "g"}
    assert drawn == list(drawn_mutations({"m.py": text}, seed=0))
    assert drawn != list(drawn_mutations({"m.py": text}, seed=1))
    assert sorted(drawn, key=lambda each: (each.start, each.after)) == sorted(
        mutations_of("m.py", text), key=lambda each: (each.start, each.after)
    )
