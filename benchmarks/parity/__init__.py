"""The cases of `benchmarks.reward_parity`: for each reward what ours says, beside the original's own code where it is
installed (verl's, Math-Verify's, reasoning_gym's), and elsewhere beside a reimplementation of its published rule."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.rewards import compute_score


@dataclass(frozen=True)
class Compared:
    """One case.

    Attributes:
        reward: its name in `docs/rewards.md`.
        case: what was scored, in short.
        ours, theirs: the two scores.
        stated: of a difference that `docs/rewards.md` states: the first cell of its row there; else empty.
    """

    reward: str
    case: str
    ours: float
    theirs: float
    stated: str = ""

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.theirs) < 1e-6


async def score(
    data_source: str,
    texts: Sequence[str],
    ground_truth: Any,
    calls: Sequence[Sequence[tuple[str, str]]] = (),
    **options: Any,
) -> float:
    """Our score of a conversation, as verl's reward worker asks for it. A verifier that failed or ran out of time is
    told apart from a wrong answer: it gives -9."""
    response = "".join(texts)
    extra_info = {
        "assistant_texts": list(texts),
        "assistant_calls": [[{"name": name, "arguments": arguments} for name, arguments in turn] for turn in calls],
        "call_statuses": [],
    }
    found = await compute_score(data_source, response, ground_truth, extra_info, **options)
    return -9.0 if found["failed"] or found["timed_out"] else found["score"]


def of_verl(path: str) -> Any:
    """A module of verl's `utils/reward_score`, without importing verl, which takes a while and a GPU stack.

    Raises:
        ModuleNotFoundError: verl is not installed here.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed here: its rewards are the originals")
    file = Path(next(iter(spec.submodule_search_locations)), "utils", "reward_score", path)
    name = "of_verl_" + path.removesuffix(".py").replace("/", "_").removesuffix("___init__")
    if name not in sys.modules:
        folder = [str(file.parent)] if file.name == "__init__.py" else None
        found = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]
