"""Clients that give calls other ids than they came with: continuations, and the ids that the model gets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.agent_sessions import ADD, Agent, answer, call_text, echo, make_run, texts, turns, user
from verl_multiturn.proxy.protocols.requests import ChatRequest, Completion

SUM = call_text("add", {"a": 1})
OTHER = call_text("add", {"a": 2})
TASK = [user("1+1?")]


def renamed(messages: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return messages with other ids; one that is not named keeps its own."""
    text = json.dumps(messages)
    for name, other in names.items():
        text = text.replace(json.dumps(name), json.dumps(other))
    return list(json.loads(text))


def numbered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the ids that Agno gives: the calls of a request are counted from its first one."""
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return renamed(messages, {own: f"call_{number:08x}" for number, own in enumerate(dict.fromkeys(ids))})


def asked(first: Completion, *answers: str) -> list[dict[str, Any]]:
    """Return the task, a turn with calls, and the tools' answers."""
    return [*TASK, echo(first), *answer(first, *answers)]


async def test_ids_that_are_numbered_anew_in_each_request_are_one_root() -> None:
    agent = Agent(make_run(turns(*[SUM] * 8, "done")))
    messages: list[dict[str, Any]] = [*TASK]
    for _ in range(8):
        said = await agent.ask(numbered(messages), [ADD])
        messages += [echo(said), *answer(said, "2")]
    await agent.ask(numbered(messages), [ADD])
    assert len(agent.session.forest.roots) == 1
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, *range(8)]
    assert outcome.places == [0] * 9


async def test_a_request_with_other_ids_again_is_another_sample_of_its_prompt() -> None:
    agent = Agent(make_run(turns(SUM, "a", "b", "c")))
    first = await agent.ask(TASK, [ADD])
    messages = asked(first, "2")
    await agent.ask(numbered(messages), [ADD])
    await agent.ask(messages, [ADD])
    await agent.ask(renamed(messages, {first.calls[0].id: "toolu_1"}), [ADD])
    assert len(agent.session.forest.completions[first.id].prompts) == 1
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, 0, 0, 0]


async def test_the_template_gets_the_ids_that_the_session_gave() -> None:
    """Mistral's templates refuse others; and answers of parallel calls belong to the calls that they name."""
    run = make_run(turns(f"{SUM}\n{OTHER}", "a"))
    shown: list[Any] = []
    following = run.renderer.following

    async def noted(said: Any, messages: Any, *more: Any) -> Any:
        shown.append((said, messages))
        return await following(said, messages, *more)

    run.renderer.following = noted  # type: ignore[method-assign]
    agent = Agent(run)
    first = await agent.ask(TASK, [ADD])
    one, two = (call.id for call in first.calls)
    results = [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in ((two, "3"), (one, "2"))]
    await agent.ask(numbered([*TASK, echo(first), *results]), [ADD])
    ((said, messages),) = shown
    assert [call["id"] for call in said["tool_calls"]] == [one, two]
    assert messages == results
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, 0]


async def test_a_prompt_that_cannot_be_appended_is_rendered_whole_with_the_ids_that_the_session_gave() -> None:
    run = make_run(turns(SUM, "a"))
    shown: list[Any] = []
    whole = run.renderer.prompt

    async def prompt(messages: Any, *more: Any) -> Any:
        shown.append(messages)
        return await whole(messages, *more)

    async def refused(*_: Any) -> Any:
        raise _refusal()

    run.renderer.prompt, run.renderer.following = prompt, refused  # type: ignore[method-assign, assignment]
    agent = Agent(run)
    first = await agent.ask(TASK, [ADD])
    await agent.ask(numbered(asked(first, "2")), [ADD])
    assert shown[1][1]["tool_calls"][0]["id"] == shown[1][2]["tool_call_id"] == first.calls[0].id
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, None]


def _refusal() -> Exception:
    from verl_multiturn.proxy.protocols.requests import RefusedError

    return RefusedError(400, "invalid_request_error", "cannot be appended")


async def test_calls_that_look_the_same_are_told_apart_by_what_followed() -> None:
    """Two sub-agents with one task: their calls have the same renamed id, and the answers differ."""
    agent = Agent(make_run(turns(SUM, SUM, "a", "b", "c", "d")))
    first, second = await agent.ask(TASK, [ADD]), await agent.ask(TASK, [ADD])
    one = [*asked(first, "2")]
    two = [*asked(second, "3")]
    one.append(echo(await agent.ask(one, [ADD])))  # with its own ids
    two.append(echo(await agent.ask(two, [ADD])))
    await agent.ask(numbered([*one, user("y")]), [ADD])
    await agent.ask(numbered([*two, user("z")]), [ADD])
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, None, 0, 1, 2, 3]
    assert outcome.places == [0, 1, 0, 1, 0, 1]


# A client's changes of the ids X and Y of two calls in turns one after the other, and of the answers to them.
BROKEN = {
    "one id for both calls": ("c0", "c0", "c0", "c0"),
    "an answer to another call": ("c0", "c1", "c1", "c1"),
    "an answer with the id that the session gave": ("c0", "c1", "c0", "Y"),
    "the first answer with the id that the session gave": ("c0", "c1", "X", "c1"),
    "the id of the other call": ("Y", "c1", "Y", "c1"),
    "both ids crossed": ("Y", "X", "Y", "X"),
    "another call under an id that the session gave": ("X", "X", "X", "X"),
}
KEPT = {
    "the last answer to no call": ("c0", "c1", "c0", "c2"),
    "the last answer to the first call": ("c0", "c1", "c0", "c0"),
    "the last answer to the first call, not renamed": ("X", "Y", "X", "X"),
    "one renamed": ("X", "c1", "X", "c1"),
}


@pytest.mark.parametrize("given", [*BROKEN.values(), *KEPT.values()], ids=[*BROKEN, *KEPT])
async def test_the_model_is_shown_which_answer_belongs_to_which_call(given: tuple[str, ...]) -> None:
    """A request whose ids are not renamed one for one is another conversation."""
    agent = Agent(make_run(turns(SUM, OTHER, "a", "b")))
    first = await agent.ask(TASK, [ADD])
    before = asked(first, "2")
    second = await agent.ask(before, [ADD])
    own = {"X": first.calls[0].id, "Y": second.calls[0].id}
    sent = json.loads(json.dumps([*before, echo(second), *answer(second, "3")]))
    sent[1]["tool_calls"][0]["id"], sent[3]["tool_calls"][0]["id"], sent[2]["tool_call_id"], sent[4]["tool_call_id"] = (
        own.get(name, name) for name in given
    )
    third = await agent.ask(sent, [ADD])
    fourth = await agent.ask([*sent, echo(third), user("y")], [ADD])
    for made, messages in ((third, sent), (fourth, [*sent, echo(third), user("y")])):
        shown = agent.session.forest.completions[made.id].prompt.conversation
        assert references(shown) == references(messages)
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, 0, 1 if given in KEPT.values() else None, 2]


def references(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return roles and texts, with the place of its first mention for each id."""
    places: dict[str, int] = {}
    found: list[tuple[Any, ...]] = []
    for message in messages:
        ids = [call["id"] for call in message.get("tool_calls", ())] or [message.get("tool_call_id", "")]
        named = [places.setdefault(each, len(places)) for each in ids]
        found.append((message["role"], message["content"] or "", *named))
    return found


async def test_an_id_that_was_made_up_before_is_not_renamed() -> None:
    """The client's own example has the id that it then gives to the model's call: two calls with one id."""
    example = [
        {"role": "assistant", "content": None, "tool_calls": [{**_call(), "id": "call_00000000"}]},
        {"role": "tool", "tool_call_id": "call_00000000", "content": "0"},
    ]
    agent = Agent(make_run(turns(SUM, "a", "b")))
    begun = [*TASK, *example, user("2+2?")]
    first = await agent.ask(begun, [ADD])
    sent = [*begun, echo(first), *answer(first, "4")]
    await agent.ask(renamed(sent, {first.calls[0].id: "call_00000000"}), [ADD])
    await agent.ask(renamed(sent, {first.calls[0].id: "call_00000001"}), [ADD])
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, None, 0]


async def test_calls_that_a_client_made_up_are_not_renamed() -> None:
    """The template may show the ids, so that another id is another prompt."""
    agent = Agent(make_run(turns("a", "b")))
    for id_ in ("call_1", "call_2"):
        turn = {"role": "assistant", "content": None, "tool_calls": [{**_call(), "id": id_}]}
        await agent.ask([*TASK, turn, {"role": "tool", "tool_call_id": id_, "content": "2"}], [ADD])
    assert len(agent.session.forest.roots) == 2
    await agent.close()


async def test_the_ids_of_another_session_are_names_like_others() -> None:
    run = make_run(turns(SUM, SUM, "a"))
    one, other = Agent(run, "one"), Agent(run, "other")
    first, second = await one.ask(TASK, [ADD]), await other.ask(TASK, [ADD])
    await other.ask(asked(first, "2"), [ADD])
    assert first.calls[0].id != second.calls[0].id
    outcome, _ = await other.close()
    assert [turn.parent for turn in outcome.turns] == [None, 0]
    await one.close()


async def test_a_rewritten_history_with_other_ids_begins_a_root_of_its_own() -> None:
    agent = Agent(make_run(turns(SUM, OTHER, "a", "b", "c")))
    first = await agent.ask(TASK, [ADD])
    before = asked(first, "2")
    second = await agent.ask(numbered(before), [ADD])
    sent = [*before, echo(second), *answer(second, "3")]
    changed = [*sent[:2], {**sent[2], "content": "5"}, *sent[3:]]
    third = await agent.ask(numbered(changed), [ADD])
    await agent.ask(numbered([*changed, echo(third), user("y")]), [ADD])
    await agent.ask(numbered(sent), [ADD])
    outcome, _ = await agent.close()
    assert [turn.parent for turn in outcome.turns] == [None, 0, None, 2, 1]
    first_row = next(row for row in texts(outcome) if any("5" in text for _, text in row))
    assert [source for source, _ in first_row][:2] == ["PROMPT", "SAMPLED"]


async def test_reading_a_turn_with_other_ids_costs_no_more_with_a_long_history(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.proxy.sessions import forest

    looked: list[int] = []
    real = forest.compared

    def counted(message: Any, *more: Any) -> Any:
        looked.append(1)
        return real(message, *more)

    monkeypatch.setattr(forest, "compared", counted)
    agent = Agent(make_run(turns(*[SUM] * 30), prompt_length=100_000, response_length=100_000))
    messages: list[dict[str, Any]] = [*TASK]
    counts = []
    for _ in range(30):
        looked.clear()
        said = await agent.ask(numbered(messages), [ADD])
        counts.append(len(looked))
        messages += [echo(said), *answer(said, "2")]
    assert counts[2:] == [counts[2]] * 28
    await agent.close()


def _call() -> dict[str, Any]:
    return {"id": "", "type": "function", "function": {"name": "add", "arguments": '{"a": 0}'}}


async def test_tokens_of_a_request_with_other_ids_are_those_of_its_prompt() -> None:
    agent = Agent(make_run(turns(SUM, "a")))
    first = await agent.ask(TASK, [ADD])
    counted = await agent.session.count_tokens(ChatRequest(numbered(asked(first, "2")), [ADD]))
    assert (await agent.ask(asked(first, "2"), [ADD])).prompt_tokens == counted
    assert re.fullmatch(r"[0-9A-Za-z]{9}", first.calls[0].id)
    await agent.close()


def _answers(first: Completion, *given: tuple[int | None, str]) -> list[dict[str, Any]]:
    """Return tools' answers to the calls with these indices, or without an id."""
    ids = [call.id for call in first.calls]
    return [
        {"role": "tool", "content": text} | ({} if index is None else {"tool_call_id": ids[index]})
        for index, text in given
    ]


_NO_IDS = ((None, "r"), (None, "s"))
_IN_ORDER = ((0, "r"), (1, "s"))
_CROSSED = ((1, "r"), (0, "s"))


@pytest.mark.parametrize("calls_have_ids", [True, False])
@pytest.mark.parametrize(
    ("earlier", "later", "prompts"),
    [
        (_NO_IDS, _CROSSED, 2),
        (_CROSSED, _NO_IDS, 2),
        (((1, "r"), (None, "s")), _NO_IDS, 2),
        (_NO_IDS, _IN_ORDER, 1),
        (_IN_ORDER, _NO_IDS, 1),
        (_CROSSED, ((1, "r"), (None, "s")), 1),
        (_NO_IDS, _NO_IDS, 1),
        (_CROSSED, ((None, "r"), (0, "s")), 1),
        (((None, "r"),), ((None, "r"), (0, "s")), 2),
    ],
)
async def test_an_answer_without_an_id_is_of_the_first_call_that_waits(
    earlier: Sequence[tuple[int | None, str]],
    later: Sequence[tuple[int | None, str]],
    prompts: int,
    calls_have_ids: bool,
) -> None:
    """The same texts for other calls are another prompt; each prompt names the call of each answer."""
    agent = Agent(make_run(turns(f"{SUM}\n{OTHER}", "a", "b")))
    first = await agent.ask(TASK, [ADD])
    said = echo(first)
    if not calls_have_ids:
        said["tool_calls"] = [{**call, "id": ""} for call in said["tool_calls"]]
    ids = [call.id for call in first.calls]
    for given in (earlier, later):
        await agent.ask([*TASK, said, *_answers(first, *given)], [ADD])
        node = list(agent.session.forest.completions.values())[-1]
        waits = [index for index in (0, 1) if index not in [index for index, _ in given]]
        meant = [ids[waits.pop(0) if index is None else index] for index, _ in given]
        assert [message["tool_call_id"] for message in node.prompt.conversation[2:]] == meant
        assert node.parent is not None
    assert len(agent.session.forest.completions[first.id].prompts) == prompts


async def test_a_further_answer_with_an_id_is_the_same_prompt_as_without_the_request_before_it() -> None:
    agent = Agent(make_run(turns(f"{SUM}\n{OTHER}", "a", "b", "c")))
    first = await agent.ask(TASK, [ADD])
    for given in (((None, "r"),), _CROSSED, ((None, "r"), (0, "s"))):
        await agent.ask([*TASK, echo(first), *_answers(first, *given)], [ADD])
    one, both = agent.session.forest.completions[first.id].prompts
    assert (len(one.completions), len(both.completions)) == (1, 2)


@pytest.mark.parametrize("calls_have_ids", [True, False])
async def test_answers_without_ids_to_calls_that_a_client_made_up_are_of_the_first_that_waits(
    calls_have_ids: bool,
) -> None:
    agent = Agent(make_run(turns("a", "b", "c")))
    names = ("one", "two")
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**_call(), "id": name if calls_have_ids else ""} for name in names],
    }
    results = [{"role": "tool", "content": text} for text in "rs"]
    crossed = [{**each, "tool_call_id": name} for each, name in zip(results, reversed(names), strict=True)]
    await agent.ask([*TASK, said, *results], [ADD])
    named = {**said, "tool_calls": [{**_call(), "id": name} for name in names]}
    await agent.ask([*TASK, named, *crossed], [ADD])
    assert len(agent.session.forest.roots) == 2
    await agent.ask([*TASK, named, *results], [ADD])
    assert len(agent.session.forest.roots) == 2
