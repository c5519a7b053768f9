"""Conversations whose user is trained, too, in our trainers: rows, rewards, advantages, metrics and the certificate."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.integration.trainer_rows import WritableStore, make_trainer, put_in_place, stats_in, step
from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.interactions.policy_user import PolicyUser
from verl_multiturn.rollout.engines.protocol import Ask, Generation

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

SETTINGS = "actor_rollout_ref__rollout__custom__multiturn__"
BOTH = ["assistant", "user"]
SPOKEN = {"assistant": ["Hello.<|im_end|>", "Two.<|im_end|>"], "user": ["1+1?<|im_end|>", "Bye. ###STOP###<|im_end|>"]}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WritableStore:
    store = WritableStore()
    put_in_place(store, monkeypatch)
    return store


class Game(PolicyUser):
    """A game that the row decides: its `result` is the score."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.results: dict[str, Any] = {}

    async def start(self, instance_id: str, *, persona: str | None = None, result: Any = 0.0) -> None:
        self.results[instance_id] = result
        await super().start(instance_id, persona=persona)

    async def score(self, instance_id: str) -> Any:
        result = self.results.pop(instance_id)
        return {"roles": {"assistant": result[0], "user": result[1]}} if isinstance(result, list) else result


class Speakers:
    """An engine that has texts for each role; what it is asked without a role is the untrained user's."""

    def __init__(self, tokenizer: Any, spoken: Mapping[str, list[str]]) -> None:
        self._tokenizer = tokenizer
        self._left = {role: list(texts) for role, texts in spoken.items()}

    async def generate(self, ask: Ask) -> Generation:
        is_user = ask.role == "user" or (ask.role is None and ask.messages[0].get("role") == "system")
        ids = self._tokenizer.encode(self._left["user" if is_user else "assistant"].pop(0))
        return Generation(ids, [-0.5] * len(ids), [3] * len(ids), "stop")


def add(
    store: WritableStore,
    folder: Path,
    uid: str,
    session: int,
    result: Any,
    train: list[str] | None = BOTH,
    spoken: Mapping[str, list[str]] = SPOKEN,
    score: float | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Write the rows of a conversation as verl's worker writes our loop's output; return them."""
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    from tests.support.rollout_config import make_config
    from verl_multiturn.verl_bridge.loops.agent_loop import MultiTurnAgentLoop
    from verl_multiturn.verl_bridge.loops.rewards import share_score
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    path = folder / "users.yaml"
    path.write_text(f"interaction: [{{name: game, class_name: {__name__}.Game, config: {{persona: You are Ann.}}}}]")
    config = make_config(500)
    mode = "none" if score is not None else "replace"
    ours = {"interaction_config_path": str(path), "train": train, "interaction_reward": {"mode": mode}}
    ours |= more or {}
    OmegaConf.update(config.actor_rollout_ref.rollout, "custom.multiturn", ours, force_add=True)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    loop = object.__new__(MultiTurnAgentLoop)
    loop._runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), Speakers(tokenizer, spoken))
    row = {
        "raw_prompt": [{"role": "user", "content": "Hi."}],
        "extra_info": {"interaction_kwargs": {"game": {"result": result}}},
        "uid": uid, "session_id": session, "global_steps": 4,
    }  # fmt: skip
    made = asyncio.run(loop.run({"temperature": 1.0, "logprobs": True}, **row))
    outputs = made if isinstance(made, list) else [made]
    if score is not None:
        outputs[-1].reward_score = score
        outputs[-1].extra_fields["reward_extra_info"] = {}
        share_score(outputs)
    for number, output in enumerate(outputs):
        store.add(uid, session, output, number)
    return list(outputs)


def trainer_of(n: int, train: list[str] | None = BOTH, **changes: Any) -> Any:
    settings = {"algorithm__adv_estimator": "mt_grpo", f"{SETTINGS}train": train, "actor_rollout_ref__rollout__n": n}
    trainer = make_trainer(**{**settings, **changes})
    trainer._prompts = 1
    return trainer


def test_each_speaker_has_a_row_and_its_reward_at_its_end(store: WritableStore, tmp_path: Path) -> None:
    outputs = add(store, tmp_path, "u", 0, [1.0, -1.0])
    assert [output.role for output in outputs] == ["user", "assistant"]
    assert store.scores() == {"u_0_0": [-1.0], "u_0_1": [1.0]}
    assert all(row["rm_scores"][-1] and row["response_mask"][-1] for row in store.rows.values())
    assert {each["conversation"]["score"] for each in stats_in(store)} == {0.0}
    assert [each["role"] for each in stats_in(store)] == [{"score": -1.0}, {"score": 1.0}]
    assert stats_in(store)[0]["speakers"] == {"roles": {"assistant": 2, "user": 2}, "trained": BOTH}
    # A reward function reads the assistant's words, which verl takes from the last row.
    last = outputs[-1]
    assert last.extra_fields["assistant_texts"] == ["Hello.", "Two."]
    assert last.extra_fields["reward_extra_info"] == {"acc": 1.0}  # the assistant's
    assert (last.num_turns, stats_in(store)[1]["assistant_turns"]) == (4, 2)


def test_the_assistants_whole_reward_says_who_is_right(store: WritableStore, tmp_path: Path) -> None:
    modes = {"tool_reward": {"mode": "replace"}, "interaction_reward": {"mode": "add"}}
    outputs = add(store, tmp_path, "u", 0, [1.0, -1.0], more=modes)
    assert outputs[-1].extra_fields["reward_extra_info"] == {"acc": 1.0}
    assert store.scores() == {"u_0_0": [-1.0], "u_0_1": [1.0]}


@pytest.mark.parametrize(("result", "score"), [(0.5, None), (0.0, 0.5)])
def test_a_number_is_the_reward_of_both(store: WritableStore, tmp_path: Path, result: Any, score: float | None) -> None:
    add(store, tmp_path, "u", 0, result, score=score)
    assert store.scores() == {"u_0_0": [0.5], "u_0_1": [0.5]}
    assert {each["conversation"]["score"] for each in stats_in(store)} == {1.0}
    assert [each["role"]["score"] for each in stats_in(store)] == [0.5, 0.5]


def test_zero_sum_conversations_have_a_signal_and_advantages_by_role(store: WritableStore, tmp_path: Path) -> None:
    add(store, tmp_path, "u", 0, [1.0, -1.0])
    add(store, tmp_path, "u", 1, [-1.0, 1.0])
    trainer = trainer_of(2, algorithm__norm_adv_by_std_in_grpo=False, **{f"{SETTINGS}filter": "skip"})
    metrics = step(trainer, store.batch())
    assert (metrics["rollout/certificate/violations"], metrics["rollout/certificate/rows"]) == (0, 4)
    tokens = sum(int(row["response_mask"].sum()) for row in store.rows.values())
    assert metrics["rollout/certificate/tokens"] == tokens
    assert {key: store.advantage(key) for key in store.rows} == {
        "u_0_0": -1.0, "u_0_1": 1.0, "u_1_0": 1.0, "u_1_1": -1.0,
    }  # fmt: skip
    assert metrics["rollout/role/user/score/mean"] == metrics["rollout/role/assistant/score/mean"] == 0.0
    assert (metrics["rollout/role/user/turns/mean"], metrics["rollout/role/user/silent"]) == (2, 0)
    assert metrics["rollout/role/user/trained_tokens"] + metrics["rollout/role/assistant/trained_tokens"] == tokens
    assert metrics["rollout/assistant_turns/mean"] == 2
    assert metrics["rollout/groups_equal"] == 0


def test_a_user_who_never_spoke_is_counted(store: WritableStore, tmp_path: Path) -> None:
    """The assistant's turn is cut by the response length, which ends the conversation before the user's turn."""
    spoken = {"assistant": ["Hello." * 300], "user": []}

    class Cut(Speakers):
        async def generate(self, ask: Ask) -> Generation:
            made = await super().generate(ask)
            ids = made.ids[: ask.max_new_tokens]
            return Generation(ids, [-0.5] * len(ids), [3] * len(ids), "length")

    import tests.integration.test_user_roles as here

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "Speakers", Cut)
        (output,) = add(store, tmp_path, "u", 0, [1.0, -1.0], spoken=spoken)
    assert (output.role, output.total()) == ("assistant", 1.0)
    assert stats_in(store)[0]["speakers"]["roles"] == {"assistant": 1, "user": 0}
    add(store, tmp_path, "u", 1, [0.0, 0.0])
    metrics = step(trainer_of(2), store.batch())
    assert (metrics["rollout/certificate/violations"], metrics["rollout/role/user/silent"]) == (0, 1)


def test_without_the_setting_nothing_has_a_role(store: WritableStore, tmp_path: Path) -> None:
    for train in (None, ["assistant"]):
        store.rows.clear()
        (output,) = add(store, tmp_path, "u", 0, [1.0, -1.0], train=train)
        assert (output.role, store.scores()) == (None, {"u_0_0": [1.0]})
        assert {"role", "speakers"}.isdisjoint(stats_in(store)[0])


def test_rows_of_a_user_that_the_trainer_does_not_train_are_refused(store: WritableStore, tmp_path: Path) -> None:
    add(store, tmp_path, "u", 0, [1.0, -1.0])
    add(store, tmp_path, "u", 1, [1.0, -1.0])
    trainer = trainer_of(2, train=None)
    with pytest.raises(CertificateError, match="its generations have the roles 'assistant', 'user', and there are no"):
        step(trainer, store.batch())
    assert trainer.updates == []


def test_a_record_of_both_speakers_is_not_learned_from_by_one_reward() -> None:
    from verl_multiturn.config import ProxySettings
    from verl_multiturn.verl_bridge.offline.from_records.loop import _check_roles

    with pytest.raises(ConfigError, match=r"data row 3: its recorded conversation trains the roles \['assistant', 'u"):
        _check_roles({"session": None, "trained": BOTH}, ProxySettings(), "data row 3")
