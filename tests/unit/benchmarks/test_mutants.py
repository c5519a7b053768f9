"""Mutants: the modules that are drawn are there, and an explanation of one that no test sees is of one change."""

from pathlib import Path

from benchmarks.mutant_draw import COVERED, ROOT, Mutant
from benchmarks.mutants import explained, key_of, unused


def mutant(module: str, before: str, after: str) -> Mutant:
    return Mutant(module, 1, "NumberReplacer", before, after, "", "NumberReplacer 1")


def test_the_modules_that_are_drawn_and_their_tests_are_there() -> None:
    for module, tests in COVERED.items():
        assert (ROOT / "verl_multiturn" / f"{module}.py").is_file(), module
        for test in tests:
            assert (ROOT / f"{test.partition('::')[0]}.py").is_file(), test


def test_an_explanation_is_of_one_module() -> None:
    module, before, after = next(iter(explained()))
    assert key_of(mutant(module, f" {before}\n", after)) in explained()
    assert key_of(mutant("verl_multiturn/paths.py", before, after)) not in explained()


def test_explanations_that_explain_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("if x:\n    y = 1\n    z = 1\n")
    survives, killed = mutant("a.py", "y = 1", "y = 2"), mutant("a.py", "z = 1", "z = 2")
    not_drawn, gone, no_module = (
        ("a.py", "if x:\ny = 1", "pass"),
        ("a.py", "y = 3", "y = 2"),
        ("b.py", "y = 1", "y = 2"),
    )
    results = {survives: "survived", killed: "killed"}
    reasons = [key_of(survives), not_drawn, gone, no_module, key_of(killed)]
    assert unused(reasons, results, tmp_path) == [gone, no_module, key_of(killed)]
    assert unused([key_of(killed)], {killed: "timeout"}, tmp_path) == [key_of(killed)]
    # The same line may occur twice in a module.
    assert unused([key_of(killed)], {**results, mutant("a.py", "z = 1", "z = 2 "): "survived"}, tmp_path) == []
