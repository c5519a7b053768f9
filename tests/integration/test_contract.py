"""The contract with verl, SGLang and Ray: it holds here, and it has every name that our code uses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore")]  # importing all of SGLang warns a lot

AGAIN = "VERL_PLATFORM=cpu .venv/bin/python -m tests.support.foreign_names"


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    from tests.support.foreign_names import lines_found
    from verl_multiturn.runs.version_sets import SETS, judge

    if judge().nearest is not SETS[0]:
        pytest.skip("the table is written from the current set")
    return lines_found()


def test_it_holds_here() -> None:
    from verl_multiturn.verl_bridge.compat.contract import check

    assert check() == []


def test_it_has_every_name_that_we_use(found: dict[str, str]) -> None:
    from verl_multiturn.verl_bridge.compat.contract import read

    lines = {name: line for line in read() for name in line.names}
    missing = [line for name, line in found.items() if name not in lines]
    assert not missing, f"add these lines, or let `{AGAIN}` write the table:\n" + "\n".join(missing)
    # Which files need it, and whether ours takes arguments that a new verl may add.
    other = [
        f"{name}: {lines[name].needed_by} {lines[name].kind}, not {text}"
        for name, text in found.items()
        if set(lines[name].needed_by.split(", ")) != set(text.split("\t")[3].split(", "))
        or lines[name].kind.endswith("!") != text.split("\t")[1].endswith("!")
    ]
    assert not other, f"let `{AGAIN}` write the table"


def test_it_has_every_private_name_that_we_read() -> None:
    from tests.support.foreign_names import private
    from verl_multiturn.verl_bridge.compat.contract import read

    known = {part for line in read() for name in line.names for part in name.split(".")}
    missing = {name: users for name, users in private().items() if name not in known}
    assert not missing, "add a line for each, with the class that has it"


def test_it_has_no_name_that_we_do_not_use() -> None:
    from tests.support.foreign_names import is_used
    from verl_multiturn.verl_bridge.compat.contract import read

    for line in read():
        assert is_used(line.word, line.needed_by), line


@pytest.mark.parametrize(
    ("name", "needed_by", "now"),
    [
        ("verl.x.Y._dispatch_info", "trainer/rows/updates.py", "trainer/rows/updates.py"),
        ("verl.x.Y._dispatch_info", "trainer/moved.py", "trainer/rows/updates.py"),
        ("verl.x.Y._dispatch_info", "trainer/rows/updates.py, trainer/moved.py", "trainer/rows/updates.py"),
        ("verl.x.Y._dispatch_info", "trainer/hooks.py, trainer/rows/updates.py", "trainer/rows/updates.py"),
        ("verl.x.Y._dispatch_info", "verl's x.py", "verl's x.py"),
        ("verl.x.Y._that_nobody_reads", "trainer/moved.py", ""),
    ],
)
def test_a_file_that_moved_still_needs_its_names(name: str, needed_by: str, now: str) -> None:
    from tests.support.foreign_names import needed_now

    assert needed_now(name, needed_by) == now


def a_line(**changes: str) -> Any:
    from verl_multiturn.verl_bridge.compat.contract import ContractLine

    given = {"name": "verl.trainer.ppo.v1.trainer_base.PPOTrainer._save_checkpoint", "kind": "method"}
    return ContractLine(**{**given, "parameters": "self", "needed_by": "trainer/hooks.py", **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        (
            {"name": "verl.trainer.ppo.v1.trainer_base.PPOTrainer._restored_prompts"},
            "verl 0.9.1 has no PPOTrainer._restored_prompts, which trainer/hooks.py needs",
        ),
        ({"name": "verl.no.such.module.f"}, "verl 0.9.1 has no verl.no.such.module.f, which trainer/hooks.py needs"),
        (
            {"name": "transfer_queue.kv_gone", "needed_by": "a.py, b.py"},
            r"transfer_queue \S+ has no transfer_queue.kv_gone, which a.py, b.py need",
        ),
        (
            {"kind": "async method"},
            "verl 0.9.1's PPOTrainer._save_checkpoint is of the kind 'method', not 'async method', which trainer/hook",
        ),
        ({"kind": "async method|method"}, ""),
        (
            {"parameters": "self, folder"},
            r"verl 0.9.1's PPOTrainer._save_checkpoint takes \(self\), not \(self, folder\), which trainer/hooks.py ne",
        ),
        ({"name": "verl.gone.f|verl.trainer.ppo.v1.trainer_base.PPOTrainer._save_checkpoint"}, ""),
        ({"kind": "text", "name": "verl.workers.rollout.router", "parameters": "No available servers"}, ""),
        (
            {"kind": "text", "name": "verl.workers.rollout.router", "parameters": "No servers are"},
            "verl 0.9.1 has no 'No servers are' in verl.workers.rollout.router, which trainer/hooks.py needs",
        ),
        (
            {"kind": "source", "name": "verl.trainer.ppo.v1.trainer_base", "parameters": "PPOTrainer._save_checkpoint=0"},  # noqa: E501
            r"verl 0.9.1's PPOTrainer._save_checkpoint is another one \(\w{16}, not 0\): look what has changed in it, "
            "which trainer/hooks.py needs",
        ),
        (
            {"kind": "source", "name": "verl.trainer.ppo.v1.trainer_base", "parameters": "PPOTrainer.gone=0"},
            "verl 0.9.1 has no PPOTrainer.gone in verl.trainer.ppo.v1.trainer_base, which trainer/hooks.py needs",
        ),
        (
            {"kind": "dataclass", "name": "verl.DataProto", "needed_by": "verl's x.py"},
            "",
        ),
        (
            {"kind": "dataclass", "name": "verl.trainer.ppo.v1.trainer_base.PPOTrainer", "needed_by": "verl's x.py"},
            "verl 0.9.1's PPOTrainer is no dataclass any more, which verl's x.py needs",
        ),
        ({"kind": "attribute", "name": "verl.trainer.ppo.v1.trainer_base.PPOTrainer._restored_tq_prompt_count", "parameters": ""}, ""),  # noqa: E501
    ],
)  # fmt: skip
def test_what_it_says(changes: dict[str, str], said: str) -> None:
    from verl_multiturn.verl_bridge.compat.contract import check

    faults = check([a_line(**changes)])
    assert len(faults) == bool(said)
    assert not said or re.match(said, faults[0]), faults


@pytest.mark.parametrize(
    ("now", "exact", "fits"),
    [
        (lambda a, b=1: 0, False, True),
        (lambda a, b=1, c=2: 0, False, True),
        (lambda a, b=1, c=2: 0, True, False),  # a method of ours that overrides it would not take c
        (lambda a, b=1, **more: 0, True, False),
        (lambda a, b=1, *, c=2: 0, False, True),
        (lambda a, b=1, *, c: 0, False, False),
        (lambda a, b: 0, False, False),
        (lambda a: 0, False, False),
        (lambda b=1, a=1: 0, False, False),
        (lambda a, c=1, b=1: 0, False, False),
        (lambda *args, **kwargs: 0, False, False),
    ],
)
def test_a_name_fits_while_it_can_be_called_as_before(now: Callable[..., int], exact: bool, fits: bool) -> None:
    from verl_multiturn.verl_bridge.compat.contract import _fits, _parameters

    assert _fits("a, b=", _parameters(now), exact=exact) is fits


def test_what_is_given_by_name_may_move() -> None:
    from verl_multiturn.verl_bridge.compat.contract import _fits

    assert _fits("*, a, b=", "b=, a=", exact=False)
    assert _fits("*, a, b=", "*, c=, a, b=", exact=False)
    assert not _fits("*, a, b=", "*, a", exact=False)
    assert not _fits("a, *, b=", "*, a, b=", exact=False)


def test_a_module_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.compat import contract

    def fail(name: str) -> ModuleType:
        raise ImportError("libcuda.so is missing")

    monkeypatch.setattr(contract.importlib, "import_module", fail)
    said = "verl 0.9.1: PPOTrainer._save_checkpoint cannot be imported (ImportError: libcuda.so is missing), which "
    assert contract.check([a_line()]) == [f"{said}trainer/hooks.py needs"]


def test_a_source_is_another_one_by_its_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.compat.contract import digest_of

    monkeypatch.syspath_prepend(tmp_path)
    code = 'return f"{x} {1}"'
    texts = {
        "plain": f"class A:\n    def f(self, x):\n        {code}\n",
        "told": f'class A:\n    # why\n    def f(\n        self, x\n    ):\n        "Say it."\n        {code}  # so\n',
        "other": f"class A:\n    def f(self, x):\n        {code} + x\n",
    }
    for name, text in texts.items():
        (tmp_path / f"of_{name}.py").write_text(text)
    plain, told, other = (digest_of(f"of_{name}.A.f") for name in texts)
    assert (plain == told, plain == other) == (True, False)
