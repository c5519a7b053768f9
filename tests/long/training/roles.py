"""Roles: whether zero-sum games between two players that are both the policy teach each of them, and nobody else.

    python -m benchmarks.roles [--short]

A group is four games, of which white wins the first, third and fourth. They are played over real HTTP, in each of the
endpoint's protocols, on a scripted engine; the rows go through our trainer's hooks, the certificate among them. The
last line is a JSON object:

- `wrong`: all faults, has to be 0; `faults`: their number by kind;
- `advantages`: of each player in the four games: ±0.5 and ±1.5, as each player's results are compared with its own;
- `left_out`: groups of games that a filter left out or skipped, of `groups`, under each filter and in each replay
  buffer: 0. `left_out_without_roles`: the same of games whose rows name no roles, which is each of them: the control;
- `rows_of_one_role`: rows of sessions of one role that were compared with those of sessions without roles: rewards,
  masks and advantages equal bit by bit. `recorded`: recorded batches without roles whose advantages are, bit by bit,
  those of the commit before roles (`tests/integration/test_same_advantages.py`);
- `untrained_completions`: completions of a role that is not in `proxy.train`, which the certificate has counted;
  `their_tokens`: trained tokens of these: 0.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

from tests.agent_sessions import END, make_run, tiny_tokenizer
from tests.integration.test_agent_loop import runner
from tests.integration.test_same_advantages import CASES, RECORDED, computed
from tests.integration.trainer_rows import WritableStore, make_trainer, step
from tests.long.training.dapo_filter import BATCH, Case, Queue, in_place, make_buffer
from tests.long.training.role_games import MOVES, PLAYERS, PROTOCOLS
from verl_multiturn.config import FilterMode, ProxySettings, read_settings
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.observe.roles import role_of
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine

RESULTS = (1.0, -1.0, 1.0, 1.0)
"""White's result in each game of a group; black's is its negative."""
ADVANTAGES = {"white": (0.5, -1.5, 0.5, 0.5), "black": (-0.5, 1.5, -0.5, -0.5)}
"""Results less their mean, divided by their deviation (of a sample), which is 1."""
_CLOSE = 2e-6
"""verl adds 1e-6 to a deviation before dividing by it."""
_OURS = "actor_rollout_ref__rollout__custom__multiturn__"
_FILTERS: Sequence[tuple[str, FilterMode, str | None]] = (
    ("off", "off", None), ("skip", "skip", None), ("refill", "refill", None), ("difficulty", "difficulty", None),
    ("filter_groups", "off", "reward"), ("filter_groups by acc", "off", "acc"),
)  # fmt: skip


def play(
    protocol: str, roles: Roles | None, rewards: str = "roles", models: Sequence[str] = PLAYERS
) -> list[list[Any]]:
    """Play a group of games; return the rows of each, as our agent loop returns them.

    Args:
        protocol: The protocol of all requests.
        roles: The roles of the endpoint; None: there are none.
        rewards: Which rewards the agent returns (`role_games.game`).
        models: The model that white names in its requests, and black.
    """

    def say(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        return tiny_tokenizer().encode("a" * (len(ids) % 5 + 1) + END)

    async def played() -> list[list[Any]]:
        run, finisher = make_run(say, roles=roles), runner(ScriptedEngine([]))
        agents = build_runner(ProxySettings(agent="tests.long.training.role_games:game"))
        endpoint = Endpoint(run, agents, ProxyServer(), 600.0)
        made = []
        try:
            for number, white in enumerate(RESULTS):
                told = {"protocol": protocol, "white": white, "rewards": rewards}
                told["models"] = dict(zip(PLAYERS, models, strict=True))
                row = {"raw_prompt": [{"role": "user", "content": "Play."}], "extra_info": told}
                outcome, receipts = await endpoint.run(f"u {number}", row, {"temperature": 1.0})
                if not outcome.valid or outcome.error:
                    raise RuntimeError(f"a game over {protocol} ended with {outcome.stop_reason}: {outcome.error}")
                key = {"uid": "u", "session_id": number}
                made.append(finisher.finish(outcome, receipts, key, 4, {"temperature": 1.0}))
        finally:
            await endpoint.aclose()
        return made

    return asyncio.run(played())


def train(games: Sequence[Sequence[Any]], roles: Roles | None, credit: str) -> tuple[WritableStore, dict[str, Any]]:
    """Train a step with a group of games; return its rows, with their advantages, and the step's metrics."""
    from verl.trainer.ppo.v1 import trainer_base

    from verl_multiturn.verl_bridge.compat import row_store

    store = WritableStore()
    for session, rows in enumerate(games):
        for number, output in enumerate(rows):
            store.add("u", session, output.model_copy(deep=True), number)
    changes: dict[str, Any] = {f"{_OURS}proxy__credit": credit, "algorithm__adv_estimator": "mt_grpo"}
    changes["actor_rollout_ref__rollout__agent__default_agent_loop"] = "proxy_agent"
    if roles is not None:
        changes |= {f"{_OURS}proxy__roles": list(roles.names), f"{_OURS}proxy__train": list(roles.trained)}
    with mock.patch.object(row_store, "transfer_queue", store), mock.patch.object(trainer_base, "tq", store):
        trainer = make_trainer(**changes)
        trainer._prompts = 1
        metrics = step(trainer, store.batch())
    return store, metrics


def learned(store: WritableStore) -> dict[tuple[str | None, int], list[float]]:
    """Return the advantages of the trained tokens, by role and game, each value once."""
    found: dict[tuple[str | None, int], set[float]] = {}
    for name, row in store.rows.items():
        role, number = role_of(row["metrics"]["rollout"]), int(name.split("_")[1])
        values = row["advantages"][row["response_mask"] != 0].tolist()
        found.setdefault((role, number), set()).update(values)
    return {key: sorted(values) for key, values in found.items()}


def advantages(protocols: Sequence[str], faults: Counter[str]) -> dict[str, list[float]]:
    """Compare the advantages of both players with `ADVANTAGES`; return those of the last group that was trained."""
    roles, made = Roles(PLAYERS, PLAYERS), {}
    expected = {(player, at): [value] for player, own in ADVANTAGES.items() for at, value in enumerate(own)}
    for protocol in protocols:
        for rewards, credit in (("roles", "session"), ("roles", "completion"), ("completions", "completion")):
            store, metrics = train(play(protocol, roles, rewards), roles, credit)
            made = learned(store)
            if rewards == "completions":  # a player's first completion earned what its second one did
                made = {key: own[-1:] for key, own in made.items()}
            faults["advantages"] += sum(
                not (own := made.get(key, [])) or any(abs(value - wanted) > _CLOSE for value in own)
                for key, (wanted,) in expected.items()
            )
            faults["advantages"] += len(made.keys() - expected.keys())
            faults["violations"] += int(metrics["rollout/certificate/violations"])
            faults["groups_equal"] += int(metrics["rollout/groups_equal"])
            for player in PLAYERS:
                name = f"rollout/role/{player}"
                wanted = {"conversations": 4, "silent": 0, "turns/max": MOVES, "score/mean": sum(RESULTS) / 4}
                wanted["score/mean"] *= 1 if player == "white" else -1
                faults["metrics"] += sum(metrics[f"{name}/{key}"] != value for key, value in wanted.items())
                faults["metrics"] += abs(metrics[f"{name}/advantage/mean_abs"] - 0.75) > _CLOSE
    return {player: [round(made[player, at][0], 3) for at in range(len(RESULTS))] if made else [] for player in PLAYERS}


class Games(Queue):
    """A TransferQueue in which each group is the same four games, under a name of its own.

    Args:
        store: The rows of the games.
        seed: Decides in which order groups end.
    """

    def __init__(self, store: WritableStore, seed: int) -> None:
        super().__init__(Case("games"), random.Random(seed))
        self._store = store

    def submit(self, count: int) -> None:
        """Begin groups."""
        for _ in range(count):
            uid = f"g{len(self.groups)}"
            self.groups[uid] = []
            self.tags[uid] = {"is_prompt": True, "status": "running", "global_steps": self.step}
            self.running.append(uid)

    def finish(self) -> None:
        """End a running group."""
        if self.running:
            uid = self.running.pop(self.rng.randrange(len(self.running)))
            self.tags[uid]["status"] = "finished"
            for name, row in self._store.rows.items():
                key = f"{uid}{name.removeprefix('u')}"
                self.tags[key], self.rows[key] = {"min_global_steps": self.step - 1}, row


def left_out(store: WritableStore, mode: FilterMode, metric: str | None, is_async: bool, steps: int) -> tuple[int, int]:
    """Train steps of games under a filter; return how many groups it left out or skipped, and how many it saw."""
    queue, out, seen = Games(store, 0), 0, 0
    with in_place(queue):
        buffer = make_buffer(queue, metric, is_async, is_ours=True, mode=mode)
        for queue.step in range(1, steps + 1):
            queue.polls = 0
            buffer.begin_step()
            queue.submit(BATCH)
            batch = buffer.sample(queue.step, "train", BATCH)[0]
            queue.kv_clear("train", batch.keys)
            left = [uid for uids in buffer.take_left().values() for uid in uids]
            out += len(left) + len(buffer.filter.silent)
            seen += len(left) + len({key.split("_")[0] for key in batch.keys})
    return out, seen


def without_roles(store: WritableStore) -> WritableStore:
    """Return the same rows as if their sessions had no roles: each has the reward of the whole, and nothing else."""
    plain = WritableStore()
    for name, row in store.rows.items():
        stats = {**row["metrics"]["rollout"]}
        stats["turns"] = [{**turn, "role": None} for turn in stats["turns"]]
        if "session" in stats:
            stats["session"] = {key: value for key, value in stats["session"].items() if key not in ("role", "trained")}
        plain.rows[name] = {**row, "metrics": {**row["metrics"], "rollout": stats}}
    return plain


def filters(steps: int, faults: Counter[str]) -> dict[str, int]:
    """Look at groups of games under each filter, and return the figures."""
    roles = Roles(PLAYERS, PLAYERS)
    store, _ = train(play("chat", roles), roles, "session")
    plain, counted = without_roles(store), Counter[str]()
    for name, mode, metric in _FILTERS:
        for is_async in (False, True):
            out, seen = left_out(store, mode, metric, is_async, steps)
            counted.update(left_out=out, groups=seen)
            faults["left_out"] += out
            if mode in ("skip", "difficulty"):  # the others replace such groups, and a step has no end
                out, seen = left_out(plain, mode, metric, is_async, steps)
                counted["left_out_without_roles"] += out
                faults["control"] += out != seen
        print(name, dict(counted), flush=True)
    return dict(counted)


def one_role(protocols: Sequence[str], faults: Counter[str]) -> dict[str, int]:
    """Compare sessions of one role with those without roles, and recorded batches with those of the commit before."""
    names, compared = ("policy", "policy"), 0
    for protocol in protocols:
        for credit in ("session", "discounted", "completion"):
            roles = Roles(("policy",), ("policy",))
            one, _ = train(play(protocol, roles, "reward", names), roles, credit)
            none, _ = train(play(protocol, None, "reward", names), None, credit)
            faults["rows_of_one_role"] += one.rows.keys() != none.rows.keys()
            for name in one.rows.keys() & none.rows.keys():
                columns = ("input_ids", "response_mask", "rm_scores", "advantages", "returns")
                own, other = one.rows[name], none.rows[name]
                faults["rows_of_one_role"] += any(own[each].tolist() != other[each].tolist() for each in columns)
                compared += 1
    for case, (name, settings, std, agents) in CASES.items():
        faults["recorded"] += computed(name, read_settings(settings), std, agents) != RECORDED[case]
    return {"rows_of_one_role": compared, "recorded": 40 * len(CASES)}


def untrained_role(protocols: Sequence[str], faults: Counter[str]) -> dict[str, int]:
    """Play games in which black is not trained, and return how many completions and trained tokens it had."""
    roles, counted = Roles(PLAYERS, ("white",)), Counter[str]()
    for protocol in protocols:
        store, metrics = train(play(protocol, roles), roles, "session")
        counted["untrained_completions"] += int(metrics["rollout/certificate/not_trained_role"])
        faults["violations"] += int(metrics["rollout/certificate/violations"])
        faults["not_counted"] += metrics["rollout/certificate/not_trained_role"] != MOVES * len(RESULTS)
        faults["not_counted"] += metrics["rollout/proxy/untrained/not_trained_role"] != MOVES * len(RESULTS)
        for row in store.rows.values():
            stats = row["metrics"]["rollout"]
            for turn in stats["turns"]:
                if turn["role"] != "white":
                    counted["their_tokens"] += int(row["response_mask"][turn["start"] : turn["end"]].sum())
        trained = sum(int(row["response_mask"].sum()) for row in store.rows.values())
        faults["their_tokens"] += int(trained != metrics["rollout/role/white/trained_tokens"])
        faults["their_tokens"] += "rollout/role/black/trained_tokens" in metrics
        found = learned(store)
        wanted = {("white", at): value for at, value in enumerate(ADVANTAGES["white"])}
        faults["advantages"] += found.keys() != wanted.keys() or any(
            abs(found[key][0] - value) > _CLOSE or len(found[key]) != 1 for key, value in wanted.items()
        )
    faults["their_tokens"] += counted["their_tokens"]
    return {name: counted[name] for name in ("untrained_completions", "their_tokens")}


def figures(short: bool) -> dict[str, Any]:
    """Return the figures of the last line.

    Args:
        short: Whether two parts, which have no protocol of their own to test, are played in one protocol alone.
    """
    faults: Counter[str] = Counter()
    some = PROTOCOLS[:1] if short else PROTOCOLS
    made: dict[str, Any] = {"advantages": advantages(PROTOCOLS, faults)}
    made |= filters(2 if short else 8, faults)
    made |= one_role(some, faults)
    made |= untrained_role(some, faults)
    return {"wrong": sum(faults.values()), "faults": dict(+faults), **made}
