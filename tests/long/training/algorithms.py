"""Is an algorithm of one's own what it was written to be, and does the check find the faults of one?

    python -m benchmarks.algorithms [--run DIR … | --short]

1. The five estimators of docs/write/algorithms.md, as the page has them, go through verl's call of an estimator with
   batches of random groups: conversations of several rows, invalid ones, some that are alone, two roles, padding. Each
   token has the value that the original computes for the valid ones: verl's own function for RLOO and Dr. GRPO, and the
   authors' formulas in arrays for the others.
2. `check-advantage` finds each of twelve faults that were planted, one in each function, and none in the five.
3. For the batches of a quickstart of 100 steps, or of the runs of `--run`, as records have them, GRPO as a function of
   one's own has the values of verl's `grpo`, and those that the run trained with, at the same tokens.

The last line is one JSON object.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tests.documents import blocks
from verl_multiturn.advantages.function import load_function
from verl_multiturn.checking.advantage_contract import check_advantage
from verl_multiturn.checking.examination import Grade
from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.records.read.records import read_records
from verl_multiturn.records.rows import columns
from verl_multiturn.rows.keys import RowKey

PAGE = Path("docs/write/algorithms.md")
GROUPS = 1000
_IN_BATCH = 10
_LENGTH = 40
_UNIT = 64
"""Rewards are whole numbers over this, which 32 bits hold exactly."""
GRPO = """
from statistics import fmean, stdev

def advantages(group):
    rewards = [member.reward for member in group]
    if len(rewards) == 1:
        return [rewards[0] / (1 + 1e-6)]
    mean, spread = fmean(rewards), stdev(rewards) + 1e-6
    return [(reward - mean) / spread for reward in rewards]
"""
"""verl's `grpo`, which leaves the reward of a conversation that is alone, as a function of one's own."""


@dataclass
class Played:
    """A conversation of a random group."""

    rewards: list[float]
    """Reward of each turn."""
    states: list[str]
    valid: bool
    role: str | None
    places: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """For each turn its row in the batch, its first token, and the one after its last."""

    @property
    def reward(self) -> float:
        return sum(self.rewards)


Values = list[list[float]]
Original = Callable[[Sequence[Played]], Values]


def page_files(folder: Path) -> dict[str, Path]:
    """Write the files that the page shows into a folder, and return their paths by name."""
    files = {}
    for block in blocks(PAGE):
        if block.file:
            files[block.file.removesuffix(".py")] = folder / block.file
            (folder / block.file).write_text(block.text, encoding="utf-8")
    return files


def of_verl(name: str, **settings: Any) -> Original:
    """Return verl's own function of a name, for the valid conversations of one prompt."""

    def estimate(group: Sequence[Played]) -> Values:
        import torch
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        scores = torch.tensor([[each.reward] for each in group], dtype=torch.float64)
        index = np.array(["prompt"] * len(group), dtype=object)
        made, _ = get_adv_estimator_fn(name)(scores, torch.ones_like(scores), index=index, **settings)
        return [[float(value)] * len(each.rewards) for value, each in zip(made[:, 0], group, strict=True)]

    return estimate


def of_dr_grpo(group: Sequence[Played]) -> Values:
    """Return the reward less the mean, which verl has for two and more. In the authors' code one alone has 0."""
    verl = of_verl("grpo", norm_adv_by_std_in_grpo=False)
    return verl(group) if len(group) > 1 else [[0.0] * len(group[0].rewards)]


def of_mt_grpo(group: Sequence[Played], coefficient: float = 1.0) -> Values:
    """Equations of arXiv 2505.11821 for two turns, with the constant of its code, in arrays `(B,)` and `(B, T)`."""
    turns = max(len(each.rewards) for each in group)
    rewards = np.zeros((len(group), turns))
    there = np.zeros((len(group), turns), bool)
    for i, each in enumerate(group):
        rewards[i, : len(each.rewards)], there[i, : len(each.rewards)] = each.rewards, True
    searched = there.sum(1) > 1
    turn = np.where(searched, rewards[:, 0], 0.0)

    def normal(scores: NDArray[Any]) -> NDArray[Any]:
        return (scores - scores.mean()) / ((scores.std(ddof=1) if len(scores) > 1 else 0.0) + 1e-4)

    made = np.repeat(normal(rewards.sum(1) - turn)[:, None], turns, 1)
    made[:, 0] += coefficient * normal(turn)
    made = np.where(searched[:, None], made, normal(rewards.sum(1))[:, None])
    return [row[mask].tolist() for row, mask in zip(made, there, strict=True)]


def of_gigpo(group: Sequence[Played], gamma: float = 0.95, weight: float = 1.0) -> Values:
    """Equations 3 to 8 of arXiv 2505.10978 in arrays with a row for each turn, which the mean is over."""
    of = np.repeat(np.arange(len(group)), [len(each.rewards) for each in group])
    states = np.array([state for each in group for state in each.states])
    returns = np.concatenate(
        [
            [sum(gamma**k * later for k, later in enumerate(each.rewards[t:])) for t in range(len(each.rewards))]
            for each in group
        ]
    )
    episodes = np.array([each.reward for each in group])[of]
    step = np.array([value - returns[states == state].mean() for value, state in zip(returns, states, strict=True)])
    made = episodes - episodes.mean() + weight * step
    return [made[of == i].tolist() for i in range(len(group))]


def of_rae() -> Original:
    """Return arXiv 2506.24119's baseline of each role, which sees one game after the other, as its code."""
    baselines: dict[str | None, float] = defaultdict(float)

    def estimate(group: Sequence[Played]) -> Values:
        made = []
        for each in group:
            made.append([each.reward - baselines[each.role]] * len(each.rewards))
            baselines[each.role] += (1 - 0.95) * (each.reward - baselines[each.role])
        return made

    return estimate


ORIGINALS: dict[str, tuple[str, Callable[[], Original]]] = {
    "rloo": ("advantages", lambda: of_verl("rloo")),
    "dr_grpo": ("advantages", lambda: of_dr_grpo),
    "mt_grpo_turns": ("advantages", lambda: of_mt_grpo),
    "gigpo": ("advantages", lambda: of_gigpo),
    "rae": ("Rae", of_rae),
}
"""By the page's file: the name in it, and the original."""


def random_groups(draw: random.Random, roles: Sequence[str | None]) -> list[list[Played]]:
    """Return the groups of a prompt, one for each role: the same one to eight sessions, some of them invalid."""

    def reward() -> float:
        return draw.choice([0.0, 0.0, 1.0, draw.randint(-_UNIT, _UNIT) / _UNIT])

    def played(valid: bool, role: str | None) -> Played:
        turns = draw.randint(1, 5)
        return Played([reward() for _ in range(turns)], [draw.choice("abc") for _ in range(turns)], valid, role)

    valid = [draw.random() < 0.85 for _ in range(draw.choice([1, 2, 3, 4, 8]))]
    return [[played(each, role) for each in valid] for role in roles]


class Batch:
    """A batch of verl with the rows of some prompts in any order, and a row of padding.

    Args:
        draw: Draws rows, tokens and their order.
        prompts: The groups of each prompt, one for each role.
    """

    def __init__(self, draw: random.Random, prompts: Sequence[list[list[Played]]]) -> None:
        import torch

        self.groups = [group for prompt in prompts for group in prompt]
        rows: list[_Row] = [_Row(RowKey("padding", "0", "0"), {}, [])]
        for number, prompt in enumerate(prompts):
            for role, group in enumerate(prompt):
                for session, played in enumerate(group):
                    rows += _rows(draw, f"g{number:03}", session, role, played)
        draw.shuffle(rows)
        self.mask, self.rewards = torch.zeros(len(rows), _LENGTH), torch.zeros(len(rows), _LENGTH)
        for i, row in enumerate(rows):
            for played, turn, start, end in row.turns:
                played.places[turn] = i, start, end
                self.mask[i, start : end - 1] = float(played.valid)  # the last token is an observation
                self.rewards[i, draw.randrange(start, end)] = played.rewards[turn]
        self.rows = SimpleNamespace(
            keys=[row.key for row in rows],
            padding={row.key: None for row in rows if not row.turns},
            stats={row.key: row.stats for row in rows},
        )

    def expected(self, original: Original) -> Any:
        """Return the advantages `(B, R)` by an original, which is given valid conversations alone."""
        import torch

        made = torch.zeros_like(self.mask, dtype=torch.float64)
        for group in self.groups:
            valid = [played for played in group if played.valid]
            for played, own in zip(valid, original(valid) if valid else [], strict=True):
                for turn, value in enumerate(own):
                    i, start, end = played.places[turn]
                    made[i, start:end] = value
        return made * self.mask


class _Row(NamedTuple):
    key: RowKey
    stats: dict[str, Any]
    turns: list[tuple[Played, int, int, int]]
    """The tokens of each of its turns."""


def _rows(draw: random.Random, uid: str, session: int, role: int, played: Played) -> Iterator[_Row]:
    turns = list(range(len(played.rewards)))
    cuts = sorted(draw.sample(turns[1:], draw.randint(0, len(turns) - 1)))
    for row, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(turns)], strict=True)):
        starts = [0, *sorted(draw.sample(range(2, _LENGTH - 2, 2), end - begin - 1))]
        places = list(zip(turns[begin:end], starts, [*starts[1:], _LENGTH], strict=True))
        plain = [
            {"turn": 2 * turn + role, "parent": None, "start": start, "end": stop - 1, "reward": None,
             "state": played.states[turn], "after": end - 1 - turn, "role": played.role}
            for turn, start, stop in places
        ]  # fmt: skip
        key = RowKey(uid, str(session), str(10 * role + row))
        yield _Row(key, {"valid": played.valid, "turns": plain}, [(played, *place) for place in places])


def through_the_door(place: str, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield batches with the advantages `(B, R)` that verl gets from a function of one's own.

    Args:
        place: The function's place, `algorithm.adv_estimator`.
        batches: A `Batch` or a `StoredBatch` for each step, in order.
    """
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from verl_multiturn.verl_bridge.trainer.rows.advantages import known_rows, load_run_estimator

    config = OmegaConf.create({"algorithm": {"adv_estimator": place}})
    estimator = load_run_estimator(config, MultiTurnSettings())
    assert estimator is not None
    for batch in batches:
        index = np.array([key.uid for key in batch.rows.keys], dtype=object)
        with known_rows(batch.rows, estimator):
            made, _ = get_adv_estimator_fn(place)(
                token_level_rewards=batch.rewards, response_mask=batch.mask, index=index, config=config.algorithm
            )
        yield batch, made


def largest_difference(name: str, file: Path, groups: int = GROUPS) -> float:
    """Return the largest difference of a token's advantage from the original's, in random groups.

    Args:
        name: An estimator of `ORIGINALS`.
        file: Its code.
        groups: Number of groups.
    """
    draw, worst = random.Random(name), 0.0
    attribute, make = ORIGINALS[name]
    original = make()
    roles: Sequence[str | None] = ("white", "black") if name == "rae" else (None,)
    prompts = [_IN_BATCH] * (groups // _IN_BATCH // len(roles))
    batches = (Batch(draw, [random_groups(draw, roles) for _ in range(size)]) for size in prompts)
    for batch, made in through_the_door(f"{file}:{attribute}", batches):
        worst = max(worst, float((made.double() - batch.expected(original)).abs().max()))
    return worst


@dataclass
class StoredBatch:
    """The batch of a step, as a run's records have it."""

    rows: SimpleNamespace
    mask: Any
    """`(B, R)`, as in verl's batch."""
    rewards: Any
    stored: list[list[float]]
    """The advantages that the run itself trained with, of each row's sampled tokens."""


def stored_batches(run: Path) -> Iterator[StoredBatch]:
    """Yield the batches of the steps of a finished quickstart, in order.

    Args:
        run: The run's folder.
    """
    import torch

    records = {each["request_id"]: each for each in read_records(run / "records") if not each["validation"]}
    for file in sorted((run / "records" / "join").glob("step-*.parquet")):
        joined = [line for line in pq.read_table(file).to_pylist() if not line["validation"]]
        length = max(len(records[line["request_id"]]["rows"][line["row"]]["ids"]) for line in joined)
        mask, rewards = torch.zeros(len(joined), length), torch.zeros(len(joined), length)
        keys, stats = [], {}
        for i, line in enumerate(joined):
            record = records[line["request_id"]]
            row = record["rows"][line["row"]]
            held, cut = columns(row), row["prompt_length"]
            own = torch.tensor(held["mask"][cut:], dtype=torch.float32)
            mask[i, : len(own)] = own
            rewards[i, len(own) - 1] = line["score"]
            keys.append(RowKey(line["uid"], str(line["number"]), str(line["row"])))
            said = [turn for turn, sampled in zip(held["turn_ids"][cut:], held["mask"][cut:], strict=True) if sampled]
            starts = {turn: held["turn_ids"][cut:].index(turn) for turn in dict.fromkeys(said)}
            turns = [
                {"turn": turn, "parent": None, "start": start, "end": start + 1, "reward": None, "state": None,
                 "after": 0, "role": None}
                for turn, start in starts.items()
            ]  # fmt: skip
            stats[keys[-1]] = {"valid": record["valid"], "turns": turns}
        rows = SimpleNamespace(keys=keys, padding={}, stats=stats)
        yield StoredBatch(rows, mask, rewards, [line["advantages"] for line in joined])


def quickstart_figures(runs: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Compare GRPO as a function of one's own with verl's, on the stored batches of finished quickstarts.

    Args:
        runs: Folders of the runs.
        folder: Folder in which the function is written.
    """
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    file = folder / "grpo.py"
    file.write_text(GRPO, encoding="utf-8")
    found: dict[str, Any] = {"batches": 0, "relative": 0.0, "stored_relative": 0.0, "masks_differ": 0}
    batches = (batch for run in runs for batch in stored_batches(run))
    for batch, own in through_the_door(f"{file}:advantages", batches):
        index = np.array([key.uid for key in batch.rows.keys], dtype=object)
        verl, _ = get_adv_estimator_fn("grpo")(batch.rewards, batch.mask, index=index)
        stored = torch.cat([torch.tensor(each, dtype=torch.float32) for each in batch.stored])
        largest = float(verl.abs().max()) or 1.0
        found["batches"] += 1
        found["relative"] = max(found["relative"], float((own - verl).abs().max()) / largest)
        apart = float((own[batch.mask > 0] - stored).abs().max())
        found["stored_relative"] = max(found["stored_relative"], apart / largest)
        found["masks_differ"] += int(((own != 0) != (verl != 0)).sum())
    return found


def planted_found(folder: Path) -> dict[str, str]:
    """Return the check that finds each planted fault, by the fault; "" where none does.

    Args:
        folder: Folder in which the functions are written.
    """
    file = folder / "planted.py"
    file.write_text(PLANTED, encoding="utf-8")
    found = {}
    for name in FAULTS:
        findings = check_advantage(load_function(f"{file}:{name}"))
        found[name] = next((each.check for each in findings if each.verdict is Grade.PROBLEM), "")
    return found


FAULTS = {
    "divides_by_the_deviation": "one sibling",
    "leaves_losers_out": "values",
    "nan_where_all_are_equal": "equal scores",
    "learns_rounding": "rounding",
    "powers": "huge rewards",
    "recursive": "1,000 siblings",
    "chains_alone": "a forest",
    "compares_with_the_first": "order of siblings",
    "sorts_its_input": "its input",
    "remembers": "same input",
    "draws": "same input",
    "ForgetsAPart": "state",
}
"""By the function with the fault: the check that finds it first."""
PLANTED = """
import random
from statistics import fmean, stdev


def divides_by_the_deviation(group):
    rewards = [member.reward for member in group]
    return [(reward - fmean(rewards)) / (stdev(rewards) + 1e-6) for reward in rewards]


def leaves_losers_out(group):
    return [member.reward for member in group if member.reward > 0]


def nan_where_all_are_equal(group):
    rewards = [member.reward for member in group]
    if len(rewards) == 1:
        return [0.0]
    low, high = min(rewards), max(rewards)
    return [(reward - low) / (high - low) if high > low else float("nan") for reward in rewards]


def learns_rounding(group):
    rewards = [member.reward for member in group]
    spread = stdev(rewards) if len(rewards) > 1 else 0.0
    return [(reward - fmean(rewards)) / (spread or 1.0) for reward in rewards]


def powers(group):
    weights = [2.0 ** member.reward for member in group]
    return [weight - fmean(weights) for weight in weights]


def recursive(group):
    def total(members):
        return members[0].reward + total(members[1:]) if members else 0.0

    mean = total(group) / len(group)
    return [member.reward - mean for member in group]


def chains_alone(group):
    made = []
    for member in group:
        returns, value = {}, 0.0
        for turn in reversed(member.turns):
            value += turn.earned or 0.0
            returns[turn.number] = value
        made.append([returns[turn.number] if turn.number == 0 else returns[turn.parent] for turn in member.turns])
    return made


def compares_with_the_first(group):
    return [member.reward - group[0].reward for member in group]


def sorts_its_input(group):
    group.sort(key=lambda member: member.reward)
    mean = fmean(member.reward for member in group)
    return [member.reward - mean for member in group]


SEEN = []


def remembers(group):
    SEEN.extend(member.reward for member in group)
    mean = fmean(SEEN)
    return [member.reward - mean for member in group]


def draws(group):
    return [member.reward + random.random() for member in group]


class ForgetsAPart:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def __call__(self, group):
        self.sum += sum(member.reward for member in group)
        self.count += len(group)
        return [member.reward - self.sum / self.count for member in group]

    def state_dict(self):
        return {"sum": self.sum}

    def load_state_dict(self, state):
        self.sum = state["sum"]
"""


def figures(runs: Sequence[Path] = (), groups: int = GROUPS) -> dict[str, Any]:
    """Print what was compared, and return the figures of the last line.

    Args:
        runs: Folders of finished quickstarts.
        groups: Number of random groups for each estimator.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = page_files(folder)
        largest = {each: largest_difference(each, files[each], groups) for each in ORIGINALS}
        false = [
            f"{each}: {finding.check}"
            for each, (attribute, _) in ORIGINALS.items()
            for finding in check_advantage(load_function(f"{files[each]}:{attribute}"))
            if finding.verdict is Grade.PROBLEM
        ]
        planted = planted_found(folder)
        stored = quickstart_figures(runs, folder) if runs else None
    for each, value in largest.items():
        print(f"{each}: {groups} groups, largest difference {value:.2g}")
    for fault, check in planted.items():
        print(f"{fault}: {f'found by {check!r}' if check else 'not found'}")
    made = {
        "groups": groups,
        "largest": max(largest.values()),
        "largest_of": largest,
        "planted": len(planted),
        "planted_found": sum(map(bool, planted.values())),
        "false_findings": len(false),
    }
    return made if stored is None else made | {"quickstart": stored}
