"""The user's turns, whom the policy plays, in rows of their own: literal rows, receipts, rewards, faults, replays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.on_disk import from_disk
from verl_multiturn import Interaction
from verl_multiturn.calls.slots import Gates
from verl_multiturn.certificate.conversations import unjoined
from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine, Receipts
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.errors import ConfigError, EngineError, InteractionContractError
from verl_multiturn.interactions.policy_user import PolicyUser
from verl_multiturn.interactions.running.session import InteractionGate
from verl_multiturn.records.read.records import read_back
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.replay.comparison import differences
from verl_multiturn.replay.engine import RecordedTurns, ReplayEngine
from verl_multiturn.rollout.conversation import Conversation
from verl_multiturn.rollout.engines.policy_text import PolicyText
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.rollout.scripted_chat import TinyBuilder, tiny_tokenizer
from verl_multiturn.rollout.turn_rewards import interaction_scores, turns_of
from verl_multiturn.rows.keys import RowKey

END = "<|im_end|>"
ROOMY = Limits(4096, 4096, max_user_turns=9)
TOKENIZER = tiny_tokenizer()


class Speakers:
    """An engine with the texts of two speakers, by role; a `None` among them is a failure, "…" at an end a cut."""

    def __init__(self, assistant: Sequence[str], user: Sequence[str | None]) -> None:
        self.texts: dict[str | None, list[Any]] = {"assistant": list(assistant), "user": list(user)}
        self.texts[None] = self.texts["assistant"]
        self.asked: list[Ask] = []

    async def generate(self, ask: Ask) -> Generation:
        self.asked.append(Ask(ask.request_id, list(ask.ids), ask.sampling, ask.max_new_tokens, role=ask.role))
        text = self.texts[ask.role].pop(0)
        if text is None:
            raise EngineError("it is gone")
        if text == "wait":
            await asyncio.Event().wait()
        is_cut = text.endswith("…")
        ids = TOKENIZER.encode(text.rstrip("…") + ("" if is_cut else END))
        return Generation(ids, [-0.25] * len(ids), [3] * len(ids), "length" if is_cut else "stop")


class Player(PolicyUser):
    """A user with rewards of its own."""

    given: Any = MappingProxyType({"roles": {"assistant": 1.0, "user": -1.0}})

    async def score(self, instance_id: str) -> Any:
        return self.given


def table(
    engine: Any, limits: Limits = ROOMY, given: Any = None, kind: type[Interaction] = Player, **config: Any
) -> tuple[Conversation, Request, ReceiptingEngine]:
    """Return a conversation with a trained user, its request, and the engine with the receipts."""
    ends = [TOKENIZER.eos_token_id]
    codec = ChatCodec(TinyBuilder(TOKENIZER), ends, firewall=Firewall(TOKENIZER), tokenizer=TOKENIZER)
    parser, receipting = JsonParser(TOKENIZER, ends), ReceiptingEngine(engine)
    user = kind({"persona": "You are Ann.", **config})
    user.is_trained = True
    if given is not None:
        user.given = given  # type: ignore[attr-defined]
    user.policy = PolicyText(engine, codec, parser, ends, receipting, {"temperature": 1.0})
    stage: dict[str, Any] = {}
    if isinstance(engine, ReplayEngine):
        stage = {"make_tools": engine.make_tools, "make_user": engine.make_user}
    made = Conversation(receipting, codec, parser, limits, interactions=Gates(InteractionGate, 5.0), **stage)
    return made, Request("r", [{"role": "user", "content": "Hi."}], interaction=user), receipting


def receipts(outcome: Outcome, engine: ReceiptingEngine) -> list[Receipt]:
    own = iter(engine.take("r"))
    return [outcome.user_receipts.get(turn.number) or next(own) for turn in outcome.turns]


def shown(outcome: Outcome) -> list[list[tuple[str, bool]]]:
    """Return the stretches of each row: their text, and whether they are trained."""
    rows = []
    for row in outcome.rows:
        made, stretches = row.trajectory, []
        ids = [*made.ids, None]
        begin = 0
        for i in range(1, len(ids)):
            if i == len(made.ids) or made.mask[i] != made.mask[begin]:
                stretches.append((TOKENIZER.decode(made.ids[begin:i]), bool(made.mask[begin])))
                begin = i
        rows.append(stretches)
    return rows


def check_whole(outcome: Outcome, made: list[Receipt]) -> dict[str, Any]:
    """Verify a conversation by its receipts and by its record; return the record."""
    rows = Receipts.of_rows("r", made, outcome.places, "u", 0, invalid=not outcome.valid)
    assert unjoined({RowKey("u", "0", str(each.row)): each for each in rows}, ["assistant", "user"]) == []
    record = from_disk(Life("r", outcome=outcome, generations=made))
    assert verify_record(record).violations == []
    return record


async def played(engine: Any, **settings: Any) -> tuple[Outcome, dict[str, Any]]:
    conversation, request, receipting = table(engine, **settings)
    outcome = await conversation.run(request)
    return outcome, check_whole(outcome, receipts(outcome, receipting))


async def test_the_users_turns_are_a_row_of_their_own_before_the_assistants() -> None:
    engine = Speakers(["Hello.", "Two."], ["And 1+1?", "Bye. ###STOP###"])
    outcome, record = await played(engine)
    user, assistant = shown(outcome)
    assert [text for text, trained in user if trained] == [f"And 1+1?{END}", f"Bye. ###STOP###{END}"]
    assert [text for text, trained in assistant if trained] == [f"Hello.{END}", f"Two.{END}"]
    assert "You are Ann." in user[0][0]
    assert "Hello." in user[0][0]
    assert "Two." in user[2][0]
    assert "You are Ann." not in assistant[0][0]
    assert [(turn.number, turn.role, turn.place, turn.parent, turn.after) for turn in outcome.turns] == [
        (0, "assistant", 1, None, 1), (1, "user", 0, None, 1), (2, "assistant", 1, 0, 0), (3, "user", 0, 1, 0),
    ]  # fmt: skip
    assert (outcome.sampled_turns, outcome.user_rows, outcome.stop_reason) == (2, 1, StopReason.ENVIRONMENT_DONE)
    # The engine was asked with exactly the ids before each turn of its row.
    asked = [ask for ask in engine.asked if ask.role == "user"]
    row = outcome.rows[0].trajectory
    for ask, turn in zip(asked, [outcome.turns[1], outcome.turns[3]], strict=True):
        assert ask.ids == row.ids[: row.prompt_length + turn.start]
    assert [generation["role"] for generation in record["generations"]] == ["assistant", "user"] * 2
    assert (record["trained"], record["scores"]) == (["assistant", "user"], {"assistant": 1.0, "user": -1.0})


async def test_each_role_has_its_reward_at_its_last_token() -> None:
    outcome, _ = await played(Speakers(["Hello."], ["Bye. ###STOP###"]))
    user, assistant = interaction_scores(outcome)
    assert user == [(outcome.turns[1].end - 1, -1.0)]
    assert assistant == [(outcome.turns[0].end - 1, 1.0)]
    outcome, _ = await played(Speakers(["Hello."], ["Bye. ###STOP###"]), given=0.5)
    assert [row[0][1] for row in interaction_scores(outcome)] == [0.5, 0.5]
    assert [[turn["role"] for turn in row] for row in turns_of(outcome)] == [["user"], ["assistant"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"roles": {"assistant": 1.0, "judge": 1.0}}, "score rewards the role 'judge'; the roles are 'assistant' and"),
        ({"roles": {"user": 1.0}}, "score gives 'assistant' no reward"),
        ({"roles": {"assistant": 1.0}}, "score gives 'user' no reward; give one to each role"),
        ({"role": 1.0}, "score returned {'role': 1.0}; give a number, or {'roles'"),
        ({"roles": {"assistant": 1.0, "user": "x"}}, "must give a number as reward"),
    ],
)
async def test_rewards_of_roles_that_cannot_be(given: Any, message: str) -> None:
    conversation, request, _ = table(Speakers(["Hello."], ["Bye. ###STOP###"]), given=given)
    with pytest.raises(InteractionContractError) as error:
        await conversation.run(request)
    assert message in str(error.value)


async def test_a_question_of_other_messages_begins_a_row() -> None:
    """A turn that was cut, and one whose words the assistant was shown otherwise, are not gone on from."""
    outcome, _ = await played(Speakers(["One.", "Two."], ["I was cut…", "Bye. ###STOP###"]))
    assert [row.trajectory.turns for row in outcome.rows] == [1, 1, 2]
    assert outcome.places == [2, 0, 2, 1]
    assert outcome.turns[3].parent is None
    limits = Limits(4096, 4096, user_turn_length=2)
    outcome, _ = await played(
        Speakers(["One.", "Two."], ["A long one that is shortened.", "###STOP###"]), limits=limits
    )
    assert outcome.places == [2, 0, 2, 1]


async def test_a_row_that_is_full_is_followed_by_another() -> None:
    long = "word " * 12
    whole, _ = await played(Speakers([long, "Two."], [long, "Bye. ###STOP###"]))
    assert [row.trajectory.turns for row in whole.rows] == [2, 2]
    row = whole.rows[0].trajectory
    limits = Limits(4096, row.response_length - 1)
    outcome, _ = await played(Speakers([long, "Two."], [long, "Bye. ###STOP###"]), limits=limits)
    assert [row.trajectory.turns for row in outcome.rows][:2] == [1, 1]
    assert all(row.trajectory.response_length <= limits.response_length for row in outcome.rows)


async def test_a_turn_whose_prompt_is_too_long_is_spoken_and_in_no_row() -> None:
    outcome, record = await played(Speakers(["Hello."], ["Bye. ###STOP###"]), limits=Limits(24, 4096))
    assert outcome.valid
    assert outcome.places == [0, "dropped_row"]
    assert (len(outcome.rows), outcome.user_rows) == (1, 0)
    assert record["generations"][1]["cause"] == "dropped_row"


class Twice(Player):
    """A user who asks twice with the same messages, and takes the second answer."""

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        await super().write(messages)
        return await super().write(messages)


async def test_an_answer_that_is_thrown_away_is_in_no_row() -> None:
    outcome, _ = await played(Speakers(["One.", "Two."], ["a", "b", "c", "Bye. ###STOP###"]), kind=Twice)
    assert outcome.places == [1, "undelivered", 0, 1, "undelivered", 0]
    assert [turn.parent for turn in outcome.turns] == [None, None, None, 0, 2, 2]


async def test_silence_is_an_act_of_the_model() -> None:
    outcome, _ = await played(Speakers(["One.", "Two."], ["", "Bye. ###STOP###"]))
    assert (outcome.valid, outcome.places) == (True, [2, 0, 2, 1])  # the next question does not show the silence
    assert outcome.messages[2] == {"role": "user", "content": ""}


async def test_a_user_who_never_speaks_has_no_row() -> None:
    outcome, record = await played(Speakers(["I was cut…"], []))
    assert (outcome.places, outcome.user_rows, outcome.valid) == ([0], 0, True)
    assert outcome.turns[0].role == "assistant"
    assert record["trained"] == ["assistant", "user"]


async def test_an_engine_that_fails_for_the_user_makes_the_conversation_invalid() -> None:
    outcome, _ = await played(Speakers(["One.", "Two."], ["And?", None]))
    assert (outcome.valid, outcome.stop_reason) == (False, StopReason.ENVIRONMENT_ERROR)
    assert outcome.places == [1, 0, 1]  # as it got until then; nothing of it is trained


async def test_time_that_is_up_while_the_user_speaks() -> None:
    limits = Limits(4096, 4096, wall_clock_s=0.2)
    outcome, _ = await played(Speakers(["One."], ["wait"]), limits=limits)
    assert (outcome.valid, outcome.places, outcome.time_up) == (False, [0], "interaction")


class Late(Speakers):
    """An engine that ignores a cancellation, and answers when the conversation is over."""

    def __init__(self) -> None:
        super().__init__(["One."], ["late"])
        self.over = asyncio.Event()

    async def generate(self, ask: Ask) -> Generation:
        if ask.role == "user":
            while not self.over.is_set():
                try:
                    await self.over.wait()
                except asyncio.CancelledError:
                    continue
        return await super().generate(ask)


async def test_a_turn_that_comes_back_after_the_end_belongs_to_nobody() -> None:
    engine = Late()
    conversation, request, receipting = table(engine, limits=Limits(4096, 4096, wall_clock_s=0.2))
    outcome = await conversation.run(request)
    engine.over.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert [ask.role for ask in engine.asked] == ["assistant", "user"]
    assert [turn.role for turn in outcome.turns] == ["assistant"]
    assert receipting.take("r.user0") == []
    check_whole(outcome, receipts(outcome, receipting))


class Doubts(Player):
    """A user who asks two questions at the same time, and says the first answer."""

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        other = [*messages[:-1], {"role": "user", "content": "Or?"}]
        first, _ = await asyncio.gather(super().write(messages), super().write(other))
        return first


async def test_questions_at_the_same_time_have_lanes_and_rows_of_their_own() -> None:
    engine = Speakers(["One.", "Two."], ["a", "b", "c ###STOP###", "d"])
    outcome, _ = await played(engine, kind=Doubts)
    assert [ask.request_id for ask in engine.asked] == ["r", "r.user0", "r.user1", "r", "r.user0", "r.user1"]
    assert outcome.places == [4, 0, 1, 4, 2, 3]


class Forks(Player):
    """A user who asks two questions at the same time that both go on from the turn before, and says the second."""

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        other = [*messages[:-1], {"role": "user", "content": "Or?"}]
        _, second = await asyncio.gather(super().write(other), super().write(messages))
        return second


async def test_of_two_questions_that_go_on_from_one_turn_the_second_begins_a_row() -> None:
    engine = Speakers(["One.", "Two."], ["a", "b", "c", "d ###STOP###"])
    outcome, _ = await played(engine, kind=Forks)
    assert outcome.places == [3, 0, 1, 3, 1, 2]
    assert [turn.parent for turn in outcome.turns] == [None, None, None, 0, 2, None]
    prompts = [ask.ids for ask in engine.asked if ask.role == "user"]
    spoken = [turn for turn in outcome.turns if turn.role == "user"]
    for ids, turn in zip(prompts, spoken, strict=True):
        assert isinstance(turn.place, int)
        row = outcome.rows[turn.place].trajectory
        assert ids == row.ids[: row.prompt_length + turn.start]


class Hasty(Player):
    """A user who asks on a question twice at the same time, and goes on from the first answer before the second."""

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        first = await super().write(messages)
        further = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
        await asyncio.gather(super().write(further), super().write(messages))
        return first


async def test_a_question_that_goes_on_from_a_turn_that_is_thrown_away_meanwhile_begins_a_row() -> None:
    outcome, _ = await played(Speakers(["One."], ["a ###STOP###", "b", "c"]), kind=Hasty)
    assert outcome.places == [2, "undelivered", 0, 1]
    assert [turn.parent for turn in outcome.turns] == [None] * 4


async def test_silence_of_both_does_not_make_a_turn_undelivered() -> None:
    """The second question has the messages of the first one, since the user is not shown the silences."""
    engine = Speakers(["One.", "", "Two."], ["", "", "Bye. ###STOP###"])
    outcome, _ = await played(engine)
    asked = [ask.ids for ask in engine.asked if ask.role == "user"]
    assert asked[0] == asked[1]
    assert outcome.places == [3, 0, 3, 1, 3, 2]


class Thinks(Player):
    """A user who thinks about a second question while the assistant already speaks."""

    thought: asyncio.Task[str] | None = None

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        answer = await super().reply(instance_id, messages, **kwargs)
        if self.thought is None:
            assert self.policy is not None
            self.thought = asyncio.create_task(self.policy.write([{"role": "user", "content": "And then?"}], 9, {}))
        return answer


class Overlapping(Speakers):
    """An engine that answers the assistant's second question after the user's thought."""

    async def generate(self, ask: Ask) -> Generation:
        if ask.role == "assistant" and len(self.texts["assistant"]) == 1:
            while len(self.texts["user"]) > 1:  # noqa: ASYNC110  # the event loop has no event for it
                await asyncio.sleep(0)
        return await super().generate(ask)


async def test_a_user_who_speaks_while_the_assistant_does() -> None:
    outcome, record = await played(Overlapping(["One.", "Two."], ["a", "thought", "Bye. ###STOP###"]), kind=Thinks)
    assert [turn.number for turn in outcome.turns] == [0, 1, 2, 3, 4]
    assert [turn.role for turn in outcome.turns] == ["assistant", "user", "user", "assistant", "user"]
    assert [turn.said and turn.said.content for turn in outcome.turns][2:4] == ["thought", "Two."]
    assert [reply["turn"] for reply in record["replies"]] == [0, 3]


class Narrow(Player):
    """A user who wants to be sampled in a way of its own."""

    async def write(self, messages: Sequence[Mapping[str, Any]]) -> str:
        assert self.policy is not None
        return await self.policy.write(messages, 5, {"top_p": 0.5})


async def test_a_way_of_sampling_of_its_own_is_refused() -> None:
    conversation, request, _ = table(Speakers(["One."], ["And?"]), kind=Narrow)
    with pytest.raises(ConfigError, match=r"as the assistant does \(temperature=1.0\), and .* top_p=0.5"):
        await conversation.run(request)


async def test_another_temperature_is_refused() -> None:
    conversation, request, _ = table(Speakers(["One."], ["And?"]), temperature=0.5)
    with pytest.raises(ConfigError, match=r"samples as the assistant does \(temperature=1.0\), and .* temperature=0.5"):
        await conversation.run(request)


async def test_a_user_that_is_not_trained_leaves_no_trace() -> None:
    conversation, request, receipting = table(Speakers(["One.", "Two."], []))
    request.interaction.is_trained = False
    request.interaction.policy = PolicyText(
        Speakers(["And?", "Bye. ###STOP###"], []), *_parts(), [TOKENIZER.eos_token_id], receipting, {}
    )
    outcome = await conversation.run(request)
    assert [turn.role for turn in outcome.turns] == [None, None]
    assert (outcome.places, outcome.trained, outcome.user_receipts) == ([0, 0], (), {})
    assert outcome.score == 1.0
    assert [len(each) for each in interaction_scores(outcome)] == [1]


def _parts() -> tuple[ChatCodec, JsonParser]:
    ends = [TOKENIZER.eos_token_id]
    return ChatCodec(TinyBuilder(TOKENIZER), ends, tokenizer=TOKENIZER), JsonParser(TOKENIZER, ends)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        (Speakers(["Hello.", "Two."], ["And 1+1?", "Bye. ###STOP###"]), {}),
        (Speakers(["One.", "Two."], ["I was cut…", "Bye. ###STOP###"]), {}),
        (Speakers(["One.", "Two."], ["a", "b", "c", "Bye. ###STOP###"]), {"kind": Twice}),
        (Speakers(["Hello."], ["Bye. ###STOP###"]), {"limits": Limits(24, 4096)}),
        (Speakers(["One.", "Two."], ["And?", None]), {}),
        (Speakers(["One."], ["wait"]), {"limits": Limits(4096, 4096, wall_clock_s=0.2)}),
    ],
    ids=["chain", "cut", "twice", "dropped", "failed", "late"],
)
@pytest.mark.parametrize("is_live", [False, True])
async def test_a_replay_makes_the_same_rows(engine: Speakers, settings: dict[str, Any], is_live: bool) -> None:
    engine = Speakers(list(engine.texts["assistant"]), list(engine.texts["user"]))
    _, record = await played(engine, **settings)
    if is_live and not record["valid"]:
        return  # a record has no answer of an engine that failed the interaction
    stage = ReplayEngine(is_live)
    conversation, request, receipting = table(stage, **settings)
    outcome, script = Outcome.begun("r"), RecordedTurns(record)
    stage.begin(record, outcome, script)
    await conversation.run(request, outcome)
    made = receipts(outcome, receipting)
    now = read_back(record_of(Life("r", outcome=outcome, generations=made)))
    assert script.left == 0
    assert differences(record, now) == []
