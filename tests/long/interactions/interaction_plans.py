"""Plans of the conversations of `benchmarks.interaction_faults`, and their interactions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.long.interactions import faulty_interactions as faulty
from tests.long.tools.fault_suite import GROUP

PERSONA = "You want a flight."
MODES: dict[str, dict[str, Any]] = {
    "append": {"mode": "append"},
    "window": {"mode": "window", "turns": 1},
    "overflow": {"mode": "overflow", "turns": 1, "summary_prompt": "Sum up.", "summary_length": 8},
}

Decks = dict[str, Iterator[tuple[str, str]]]


def make_decks(seed: int) -> Decks:
    """Return for each kind of fault its methods and faults, in a drawn order, again and again: none is missing."""
    decks: Decks = {}
    for kind, faults, methods in (
        ("method", faulty.BREAKS, ("start", "reply", "score")),
        ("odd", faulty.ODD, ("reply",)),
        ("close", faulty.BREAKS, ("close",)),
        ("wrong", faulty.WRONG, ("start", "reply")),
    ):
        # A `start` that returns None makes no mistake.
        cards = [card for card in itertools.product(methods, faults) if card != ("start", "none")]
        random.Random(f"{seed} {kind}").shuffle(cards)
        decks[kind] = itertools.cycle(cards)
    return decks


class Plan:
    """Plan of one conversation.

    Args:
        index: Number of the conversation.
        seed: Seed of the run.
        decks: As `make_decks` returns them.
    """

    def __init__(self, index: int, seed: int, decks: Decks) -> None:
        self._decks = decks
        choose = random.Random(f"{seed} {index}")
        group = index // GROUP
        self.mode = list(MODES)[group % len(MODES)]
        self.author_error = group % 25 == 24
        self.breaks = False
        """True when the fault has to occur and breaks the conversation wherever it is."""
        self.may_break = False
        """True when the interaction itself reports whether the fault hit the conversation."""
        self.cancel_after_s: float | None = None
        self.name = choose.choice(("one", "two"))
        self.kwargs: dict[str, Any] = {"rewards": [choose.choice((0.0, 0.25, 1.0)) for _ in range(4)]}
        self.kwargs["score"] = choose.choice((0.0, 1.0))
        broken = random.Random(f"{seed} group {group}").sample(range(GROUP), 1 + group % 3)
        if self.author_error:
            if index % 2 == 0:
                self._in_a_method(choose, "wrong")
        elif index % GROUP in broken:
            self._broken(choose)

    def _broken(self, choose: random.Random) -> None:
        kind = choose.choices(
            ("method", "odd", "close", "world", "user", "server", "policy", "cancel"), (8, 4, 1, 2, 2, 2, 1, 1)
        )[0]
        if kind == "method":
            self.may_break = True
            self._in_a_method(choose, kind)
        elif kind == "odd" or kind == "close":
            self._in_a_method(choose, kind)
        elif kind == "world":
            fault = choose.choice(faulty.WORLDS + faulty.SOUND_WORLDS)
            self.breaks = fault in faulty.WORLDS
            self.name = "world" if self.breaks else "sound world"
            self.kwargs = {"seed": 1, "env_kwargs": {"what": fault}}
        elif kind == "cancel":
            self.cancel_after_s = choose.uniform(0, 0.5)
        else:
            self.breaks = True
            self.kwargs = {} if kind == "server" else {"persona": PERSONA}
            self.name = "policy" if kind == "policy" else f"{kind} {choose.choice(faulty.ENDPOINTS)}"

    def _in_a_method(self, choose: random.Random, kind: str) -> None:
        where, fault = next(self._decks[kind])
        self.kwargs |= {"where": where, "at": choose.randint(1, 4), "fault": fault}


def interactions_file(folder: Path, endpoint: faulty.Endpoint) -> Path:
    """Write the YAML of all interactions, and return its path."""
    ours, package = "tests.long.interactions.faulty_interactions", "verl_multiturn.interactions"
    limits = {"timeout_s": faulty.TIMEOUT_S}
    users = {"model": "m", "persona": PERSONA, "attempts": 2, "timeout_s": 0.8}
    entries: list[dict[str, Any]] = [
        {"name": "one", "class_name": f"{ours}.Faulty", "limits": limits},
        {"name": "two", "class_name": f"{ours}.FaultySync", "limits": limits},
        {"name": "policy", "class_name": f"{package}.policy_user.PolicyUser", "limits": limits},
    ]
    # A sound world in a process of its own may take its time, as a busy machine makes it do.
    for name, timeout_s in (("world", 4.0), ("sound world", 60.0)):
        config = {"env": f"{ours}:FaultyWorld"}
        limits = {"timeout_s": timeout_s}
        world = {"name": name, "class_name": f"{package}.step_env.StepEnv", "config": config, "limits": limits}
        entries.append(world)
    limits = {"timeout_s": faulty.TIMEOUT_S}
    for fault in faulty.ENDPOINTS:
        address = endpoint.address(fault)
        user = {**users, "base_url": f"{address}/v1"}
        server = {"base_url": address, "action_field": "text", "timeout_s": 0.8}
        for name, place, config in (
            ("user", "llm_user.LlmUser", user),
            ("server", "openenv_client.OpenEnvClient", server),
        ):
            entry = {"name": f"{name} {fault}", "class_name": f"{package}.{place}", "config": config, "limits": limits}
            entries.append(entry)
    path = folder / "interactions.yaml"
    path.write_text(yaml.safe_dump({"interaction": entries}), encoding="utf-8")
    return path
