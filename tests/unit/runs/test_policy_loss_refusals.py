"""The keys of GSPO that the page of algorithms lists are accepted before verl is imported."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT
from tests.unit.runs.test_early_refusals import _here, refusal

__all__ = ["_here"]  # a fixture

PAGE = ROOT / "docs" / "train" / "idea_to_run.md"


def keys_of(begin: str) -> list[str]:
    """Return the keys of the row of the page's table that begins so, as a command has them."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (keys,) = (line.split(" | ")[1] for line in lines if line.startswith(f"| {begin}"))
    words: list[str] = re.findall(r"`([^`]+=[^`]+)`", keys)
    return [re.sub(r"^actor\.", "actor_rollout_ref.actor.", word) for word in words]


def test_gspo_of_turns_is_accepted_over_several_rows(tmp_path: Path) -> None:
    """And that of conversations, where each is one row."""
    rows, turns = keys_of("GSPO ("), keys_of("[GSPO of turns]")
    assert (len(rows), len(turns)) == (6, 2)
    several = ["mt.context.mode=window", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5"]
    for words in (rows, [*rows, "mt.ratio_level=conversation"], [*rows, *turns], [*rows, *turns, *several]):
        assert refusal(tmp_path, *words, recipe="gsm8k_multiturn") == "", words
    said = refusal(tmp_path, *rows, *turns, *several, "mt.ratio_level=conversation", recipe="gsm8k_multiturn")
    assert "conversations have several rows here, and a policy loss sees the rows of one micro-batch" in said
