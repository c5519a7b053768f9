"""Sessions of agents in our trainers: certificate, metrics, rewards, credit and the number of updates."""

import asyncio
import random
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.agent_sessions import Agent, echo, make_run, tiny_tokenizer, user
from tests.integration.trainer_rows import WritableStore, make_trainer, step

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

SETTINGS = "actor_rollout_ref__rollout__custom__multiturn__"
PROXY = {"actor_rollout_ref__rollout__agent__default_agent_loop": "proxy_agent", "algorithm__adv_estimator": "mt_grpo"}


@dataclass
class Tree:
    """A test's knowledge of a session: its completions in order, each with the one that it continues."""

    parents: list[int | None]
    outcome: float
    own: dict[int, float] = field(default_factory=dict)
    returned: bool = True
    """Whether the agent returned the outcome; otherwise `compute_score` gives it."""
    valid: bool = True

    @property
    def score(self) -> float:
        return self.outcome + sum(self.own.values())

    def path(self, turn: int) -> list[int]:
        parent = self.parents[turn]
        return [*([] if parent is None else self.path(parent)), turn]

    def rows(self) -> list[list[int]]:
        """Return the paths to the ends, in their order."""
        return [self.path(turn) for turn in range(len(self.parents)) if turn not in self.parents]


async def play(tree: Tree, **settings: Any) -> tuple[Any, Any]:
    """Play a session of this form, and return its outcome and receipts."""
    from verl_multiturn.rollout.limits import StopReason
    from verl_multiturn.rollout.outcome import SessionReport

    def say(request_id: str, ids: Any, turn: int) -> list[int]:
        return tiny_tokenizer().encode("a" * (len(ids) % 5 + 1) + "<|im_end|>")

    agent = Agent(make_run(say, **settings))
    said: list[list[dict[str, Any]]] = []
    for number, parent in enumerate(tree.parents):
        asked = [*([] if parent is None else said[parent]), user(f"question {number}")]
        completion = await agent.ask(asked)
        said.append([*asked, echo(completion)])
        if number in tree.own:
            assert agent.session.reward(f"chatcmpl-{completion.id}", tree.own[number])
    agent.session.end()
    await agent.session.closed()
    outcome = agent.session.outcome(StopReason.FINISHED if tree.valid else StopReason.ENGINE_ERROR)
    outcome.session = SessionReport(len(agent.session.forest.roots), {}, tree.outcome if tree.returned else None)
    return outcome, agent.session.receipts()


def add(store: WritableStore, uid: str, session: int, tree: Tree, **settings: Any) -> list[Any]:
    """Write a session's rows, as verl's worker writes our loop's output; return them."""
    from tests.integration.test_agent_loop import runner
    from verl_multiturn import ScriptedEngine

    outcome, receipts = asyncio.run(play(tree, **settings))
    outcome.request_id = f"{uid} {session}"
    made = runner(ScriptedEngine([]))
    outputs = made.finish(outcome, receipts, {"uid": uid, "session_id": session}, 4, {"temperature": 1.0})
    final = outputs[-1]
    if final.reward_score is None:
        final.reward_score = tree.outcome
        final.extra_fields["reward_extra_info"] = {"acc": tree.outcome}
    for row, output in enumerate(outputs):
        output.reward_score = final.reward_score
        output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
        store.add(uid, session, output, row)
    return outputs


def learned(store: WritableStore, uid: str, session: int, row: int) -> list[float]:
    """Return the advantage of each turn of a row: of each run of trained tokens."""
    written = store.rows[f"{uid}_{session}_{row}"]
    values: list[float] = []
    before = 0
    for mask, advantage in zip(written["response_mask"].tolist(), written["advantages"].tolist(), strict=True):
        if mask and not before:
            values.append(advantage)
        assert advantage == (values[-1] if mask else 0.0)
        before = mask
    return values


def expected(group: list[Tree], credit: str, gamma: float) -> list[dict[int, float]]:
    """Compute the advantage of each completion from the definition."""
    valid = [tree for tree in group if tree.valid]
    mean = statistics.mean(tree.score for tree in valid)
    deviation = statistics.stdev(tree.score for tree in valid) + 1e-6

    def earned(tree: Tree, turn: int) -> float:
        own, children = tree.own.get(turn, 0.0), [i for i, parent in enumerate(tree.parents) if parent == turn]
        later = gamma * statistics.mean(earned(tree, i) for i in children) if children else tree.outcome
        return own + later

    def value(tree: Tree, turn: int) -> float:
        if not tree.valid:
            return 0.0
        if credit == "completion":
            return (earned(tree, turn) - mean) / deviation
        advantage = (tree.score - mean) / deviation
        after = max(len(row) - 1 - row.index(turn) for row in tree.rows() if turn in row)
        return advantage * gamma**after if credit == "discounted" else advantage

    return [{turn: value(tree, turn) for turn in range(len(tree.parents))} for tree in group]


def random_tree(draw: random.Random) -> Tree:
    count = draw.randint(1, 7)
    parents = [draw.choice([None, *range(number), number - 1]) if number else None for number in range(count)]
    own = {turn: draw.uniform(-1, 1) for turn in range(count) if draw.random() < 0.3}
    return Tree(parents, draw.uniform(-1, 1), own, returned=draw.random() < 0.5)


def trainer_of(credit: str = "session", gamma: float = 1.0, **changes: Any) -> Any:
    proxy = {f"{SETTINGS}proxy__credit": credit, f"{SETTINGS}proxy__gamma": gamma}
    trainer = make_trainer(**{**PROXY, **proxy, **changes})
    trainer._prompts = 1
    return trainer


@pytest.mark.parametrize("credit", ["session", "discounted", "completion"])
def test_advantages_agree_with_an_independent_computation(store: WritableStore, credit: str) -> None:
    draw = random.Random(7)
    groups = {uid: [random_tree(draw) for _ in range(4)] for uid in "uv"}
    groups["v"][2].valid = False
    for uid, group in groups.items():
        for session, tree in enumerate(group):
            assert len(add(store, uid, session, tree)) == len(tree.rows())
    keys = list(store.rows)
    draw.shuffle(keys)
    metrics = step(trainer_of(credit, 0.7), store.batch(keys))
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/certificate/rows"] == len(keys)
    assert metrics["rollout/trajectories"] == 8
    for uid, group in groups.items():
        for session, (tree, values) in enumerate(zip(group, expected(group, credit, 0.7), strict=True)):
            seen: set[int] = set()
            for row, path in enumerate(tree.rows()):
                trained = [turn for turn in path if turn not in seen]
                seen.update(trained)
                made = learned(store, uid, session, row)
                assert made == pytest.approx([values[turn] for turn in trained] if tree.valid else [], abs=1e-6)


def test_which_branch_came_first_discounts_nothing(store: WritableStore) -> None:
    short_first, long_first = Tree([None, 0, 0, 2], 1.0), Tree([None, 0, 1, 0], 1.0)
    for session, tree in enumerate([short_first, long_first, Tree([None], 0.0)]):
        add(store, "u", session, tree)
    step(trainer_of("discounted", 0.5), store.batch(list(store.rows)))
    stems = [learned(store, "u", session, 0)[0] for session in (0, 1)]
    assert stems[0] == stems[1] == pytest.approx(0.25 * learned(store, "u", 0, 1)[-1])


def test_completions_in_no_row_still_earned_their_reward(store: WritableStore) -> None:
    tree = Tree([None, 0, 0, None], 1.0, {1: 0.5, 2: 0.25, 3: -2.0})
    other = Tree([None], 0.0)
    add(store, "u", 0, tree, max_rows=1)
    add(store, "u", 1, other)
    assert [key for key in store.rows if key.startswith("u_0")] == ["u_0_0"]
    assert sum(store.scores()["u_0_0"]) == pytest.approx(tree.score)
    metrics = step(trainer_of("completion", 0.5, actor_rollout_ref__rollout__n=2), store.batch())
    assert metrics["rollout/certificate/violations"] == 0
    assert metrics["rollout/proxy/untrained/dropped_row"] == 2
    assert learned(store, "u", 0, 0) == pytest.approx(
        [expected([tree, other], "completion", 0.5)[0][i] for i in (0, 1)]
    )


def test_the_score_lies_on_the_last_row_and_each_reward_on_its_completion(store: WritableStore) -> None:
    outputs = add(store, "u", 0, Tree([None, 0, 0], 1.0, {0: 0.5, 1: 0.25}))
    assert [output.reward_score for output in outputs] == [1.0, 1.0]
    assert store.scores() == {"u_0_0": [0.5, 0.25], "u_0_1": [1.0]}
    assert [row["metrics"]["rollout"]["conversation"]["score"] for row in store.rows.values()] == [1.75, 1.75]
    assert outputs[0].extra_fields["reward_extra_info"] == {"acc": 1.0}
    assert outputs[0].extra_fields["assistant_texts"] == outputs[1].extra_fields["assistant_texts"]
    assert len(outputs[1].extra_fields["assistant_texts"]) == 3


@pytest.mark.parametrize(("by_id", "accuracy"), [(False, 0.0), (True, 0.75)])
def test_rewards_of_completions_are_the_accuracy_only_where_the_agent_gave_no_other(
    by_id: bool, accuracy: float
) -> None:
    from tests.integration.test_agent_loop import runner
    from verl_multiturn import ScriptedEngine

    outcome, receipts = asyncio.run(play(Tree([None, 0, 1], 0.0, {0: 0.5, 1: 0.25, 2: 0.0})))
    outcome.session = replace(outcome.session, by_id=by_id)
    (output,) = runner(ScriptedEngine([])).finish(outcome, receipts, {"uid": "u"}, 4, {"temperature": 1.0})
    assert output.extra_fields["reward_extra_info"] == {"acc": accuracy}


def test_an_agent_that_asked_for_nothing_is_one_untrained_row(store: WritableStore) -> None:
    for session, tree in enumerate([Tree([], 0.0), Tree([None], 1.0), Tree([None, 0], 0.0)]):
        add(store, "u", session, tree)
    metrics = step(trainer_of(actor_rollout_ref__rollout__n=3), store.batch())
    assert metrics["rollout/certificate/violations"] == 0
    assert (metrics["rollout/certificate/unsampled"], metrics["rollout/invalid_share"]) == (1, 1 / 3)
    assert not store.rows["u_0_0"]["advantages"].any()
    assert learned(store, "u", 1, 0)[0] == pytest.approx(2**-0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "several"),
    [
        ({}, True),
        ({f"{SETTINGS}proxy__max_rows": 1}, False),
        ({"actor_rollout_ref__rollout__agent__default_agent_loop": "recorded_agent"}, True),
    ],
)
def test_updates_are_counted_by_prompts_where_sessions_may_have_several_rows(
    store: WritableStore, changes: dict[str, Any], several: bool
) -> None:
    trainer = trainer_of(actor_rollout_ref__actor__ppo_mini_batch_size=2, **changes)
    sizes = []

    def update(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        sizes.append(self.config.actor_rollout_ref.actor.ppo_mini_batch_size)
        return batch

    base = type(trainer).__mro__[-2]
    base._update_actor = update  # type: ignore[attr-defined]
    base._balance_batch = lambda self, batch, metrics: batch  # type: ignore[attr-defined]
    tree = Tree([None, None, None] if several else [None], 1.0)
    for uid in "uvwx":
        for session in range(4):
            add(store, uid, session, tree)
    batch = store.batch()
    trainer._balance_batch(batch, {})
    trainer._update_actor(batch, {})
    # Two updates of the 4 prompts either way: 16 sessions of 3 rows are 2 updates of 6 times `rollout.n` rows.
    assert (len(batch.keys), sizes) == ((48, [6]) if several else (16, [2]))
