"""The supported sets of versions: their locks, and the effects of other versions."""

import ast

import pytest

from tests.conftest import ROOT
from tests.unit.project.test_environments import pins
from verl_multiturn.runs import doctor, version_sets
from verl_multiturn.runs.version_sets import SETS, judge

CURRENT, NEXT = SETS


@pytest.mark.parametrize(("versions", "lock"), [(each, lock) for each in SETS for lock in each.locks])
def test_a_set_is_what_its_locks_have(versions: version_sets.VersionSet, lock: str) -> None:
    locked = pins(lock)
    assert {name: locked[name.lower()] for name in versions.versions} == versions.versions


def test_the_two_locks_differ_in_what_may_differ_alone() -> None:
    moves = set((ROOT / "requirements" / "next.moves").read_text().split())
    cpu, following = pins("cpu.lock"), pins("next.lock")
    differing = {name for name in cpu.keys() | following if cpu.get(name) != following.get(name)}
    assert differing == moves, "make next.lock again, as requirements/next.in says"
    assert cpu.keys() == following.keys()


def test_a_set_is_supported() -> None:
    for each in SETS:
        found = judge(each.versions)
        assert (found.nearest, found.verdict, found.wrong) == (each, "supported", {})


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({"verl": "0.9.2"}, "untried", "verl 0.9.2 is untried, a patch release of 0.9.1"),
        ({"verl": "0.9.0"}, "refused", "verl 0.9.0 is in no set, the nearest has 0.9.1"),
        ({"verl": "0.10.0"}, "refused", "verl 0.10.0 is in no set, the nearest has 0.9.1; a minor release of verl"),
        ({"verl": "1.0.0rc1"}, "refused", "a minor release of verl needs a set of its own"),
        ({"sglang": "0.5.14"}, "untried", "sglang 0.5.14 is untried, between those of two sets"),
        ({"sglang": "0.5.15", "transformers": "5.12.1"}, "untried", "transformers 5.12.1 is that of another set"),
        ({"sglang": "0.5.11"}, "refused", "sglang 0.5.11 is in no set, the nearest has 0.5.12"),
        ({"sglang": "0.5.20"}, "refused", "verl 0.9.1 cannot start sglang 0.5.20: since 0.5.20 SGLang's `Serv"),
        ({"sglang": "0.5.20", "verl": "0.10.0"}, "refused", "sglang 0.5.20 is in no set, the nearest has 0.5.12"),
        ({"torch": "2.13.0"}, "refused", "torch 2.13.0 is that of another set, the nearest has 2.11.0"),
        ({"transformers": "5.10.0"}, "refused", "transformers 5.10.0 is in no set, the nearest has 5.9.0"),
    ],
)  # fmt: skip
def test_another_version(changes: dict[str, str], verdict: str, said: str) -> None:
    found = judge({**CURRENT.versions, **changes})
    assert found.nearest is CURRENT
    assert found.verdict == verdict
    assert found.wrong.keys() == changes.keys()
    assert said in "; ".join(found.wrong.values())


def test_the_nearest_set_is_the_one_that_most_packages_are_of() -> None:
    found = judge({**NEXT.versions, "sglang": "0.5.20"})
    assert found.nearest is NEXT
    assert list(found.wrong) == ["sglang"]
    assert "verl 0.9.1 starts sglang up to 0.5.19" in found.wrong["sglang"]


def test_a_package_that_is_missing() -> None:
    found = judge({name: version for name, version in CURRENT.versions.items() if name != "tensordict"})
    assert (found.verdict, found.wrong) == (
        "refused",
        {"tensordict": "tensordict is not installed, the set has 0.10.0"},
    )


def test_the_doctor_warns_of_what_is_untried_and_refuses_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(**changes: str) -> dict[str, doctor.DoctorFinding]:
        versions = {**CURRENT.versions, **changes}
        monkeypatch.setattr(doctor, "installed", lambda: versions)
        return {finding.what: finding for finding in doctor._versions(judge(versions), "install")}

    assert all(finding.ok and not finding.remedy for finding in rows().values())
    assert rows()["set of versions"].found == "current (cpu.lock or gpu.lock)"
    untried = rows(verl="0.9.2")
    assert all(finding.ok for finding in untried.values())
    assert untried["verl"].remedy == "verl 0.9.2 is untried, a patch release of 0.9.1"
    refused = rows(verl="0.10.0")
    assert [what for what, finding in refused.items() if not finding.ok] == ["set of versions", "verl"]
    assert refused["set of versions"].found == "nearest: current (cpu.lock or gpu.lock)"
    assert refused["set of versions"].remedy == "install"


FOREIGN = {"verl", "sglang", "ray", "transfer_queue", "torch", "transformers", "tensordict"}


def asks_for_a_version(tree: ast.Module) -> bool:
    """Return whether code catches the ImportError of a foreign module, or reads its version."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = {
                name.id
                for handler in node.handlers
                for name in ast.walk(handler.type or ast.Name("ImportError"))
                if isinstance(name, ast.Name)
            }
            inside = {
                (each.module if isinstance(each, ast.ImportFrom) else each.names[0].name) or ""
                for statement in node.body
                for each in ast.walk(statement)
                if isinstance(each, ast.Import | ast.ImportFrom)
            }
            if caught & {"ImportError", "ModuleNotFoundError"} and {name.split(".")[0] for name in inside} & FOREIGN:
                return True
        if isinstance(node, ast.Attribute) and node.attr == "__version__" and ast.unparse(node.value) in FOREIGN:
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("version", "importlib.metadata.version"):
            asked = node.args[0] if node.args else None
            if isinstance(asked, ast.Constant) and asked.value in FOREIGN:
                return True
    return False


def test_foreign_versions_are_asked_for_in_one_place() -> None:
    try_import = "try:\n    from sglang.srt import x\nexcept (ImportError, AttributeError):\n    x = None"
    for asking in (try_import, "import ray\nif ray.__version__ > '2': ...", "importlib.metadata.version('verl')"):
        assert asks_for_a_version(ast.parse(asking))
    assert not asks_for_a_version(ast.parse("try:\n    import gymnasium\nexcept ImportError: ..."))
    rooms = {
        str(path.relative_to(ROOT / "verl_multiturn").parent)
        for path in (ROOT / "verl_multiturn").rglob("*.py")
        if asks_for_a_version(ast.parse(path.read_text()))
    }
    assert rooms == {"verl_bridge/compat"}
