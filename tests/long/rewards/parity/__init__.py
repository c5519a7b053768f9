"""Cases of `benchmarks.reward_parity`: each reward of ours beside the original that it replaces.

Where the original's own code is installed (verl's, Math-Verify's, reasoning_gym's), that code is run. Elsewhere a
reimplementation of the original's published rule takes its place.
"""

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
    """Two scores of one case.

    Attributes:
        reward: The reward's name in `docs/reference/reward-functions.md`.
        case: Short text of the scored answer.
        ours: Our score.
        theirs: The original's score.
        stated: First cell of the row in `reward-functions.md` that states a difference; empty where none is expected.
    """

    reward: str
    case: str
    ours: float
    theirs: float
    stated: str = ""

    @property
    def agrees(self) -> bool:
        """True when the two scores are equal."""
        return abs(self.ours - self.theirs) < 1e-6


async def score(
    data_source: str,
    texts: Sequence[str],
    ground_truth: Any,
    calls: Sequence[Sequence[tuple[str, str]]] = (),
    **options: Any,
) -> float:
    """Score a conversation with our reward, in the way that verl's reward worker asks for it.

    Args:
        data_source: The row's data source, which chooses the reward.
        texts: Text of each assistant turn.
        ground_truth: The row's ground truth.
        calls: Name and arguments of each tool call, for each assistant turn.
        options: Settings of the rewards, by name.

    Returns:
        The score; -9.0 for a verifier that failed or ran out of time, to distinguish it from a wrong answer.
    """
    response = "".join(texts)
    extra_info = {
        "assistant_texts": list(texts),
        "assistant_calls": [[{"name": name, "arguments": arguments} for name, arguments in turn] for turn in calls],
        "call_statuses": [],
    }
    found = await compute_score(data_source, response, ground_truth, extra_info, **options)
    return -9.0 if found["failed"] or found["timed_out"] else float(found["score"])


def of_verl(path: str) -> Any:
    """Load a module of verl's `utils/reward_score` without importing verl.

    The import of verl takes a while and needs a GPU stack.

    Args:
        path: Path of the module in that folder.

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
