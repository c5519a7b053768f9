"""Tools that a row hides (`shown: false`) and the interaction shows later."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.conftest import CharBuilder, CharTokenizer, make_schema
from verl_multiturn import (
    BaseTool,
    ConfigError,
    Interaction,
    Limits,
    Outcome,
    Reply,
    StopReason,
    ToolResponse,
    scripted_rollout,
)
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.tool_schemas import announcement
from verl_multiturn.errors import InteractionContractError
from verl_multiturn.interactions.running.registry import interaction_of_row
from verl_multiturn.rollout.scripted_chat import transcript
from verl_multiturn.runs.data import tool_call
from verl_multiturn.tools.loading.kwargs import read_tools_kwargs
from verl_multiturn.tools.running.results import CallStatus

WORDS = Limits(prompt_length=8192, response_length=8192, max_tool_response_length=10_000)


class Named(BaseTool):
    def __init__(self, name: str) -> None:
        super().__init__({}, make_schema(name, place="string"))
        self.created: list[int] = []

    async def create(self, instance_id: str, *, start: int = 0) -> None:  # type: ignore[override]  # names its kwargs
        self.created.append(start)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return ToolResponse(f"{self.name}: {parameters['place']}")


class Says(Interaction):
    """A user who answers from a list."""

    name = "says"

    def __init__(self, *replies: Reply) -> None:
        super().__init__({})
        self.left = list(replies)

    def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        return self.left.pop(0)


async def play(*replies: Reply, turns: Sequence[str], limits: Limits = WORDS, **kwargs: Any) -> Outcome:
    given = {"put": {"shown": False, "create_kwargs": {"start": 3}}, **kwargs}
    return await scripted_rollout(
        [Named("take"), Named("put")], turns, "Go.", tools_kwargs=given, interaction=Says(*replies), limits=limits
    )


def put(place: str = "here") -> str:
    return tool_call("put", {"place": place})


async def test_a_tool_is_hidden_until_the_interaction_shows_it() -> None:
    hidden, taken = Named("put"), Named("take")
    user = Says(Reply("Wait."), Reply("You may put now.", shows=["put"]), Reply("Bye.", done=True))
    outcome = await scripted_rollout(
        [taken, hidden],
        [put(), "I cannot.", "And now?", put("there"), "Done."],
        "Put it there.",
        tools_kwargs={"put": {"shown": False, "create_kwargs": {"start": 3}}},
        interaction=user,
        limits=WORDS,
    )
    assert hidden.created == [3]  # bound from the beginning
    refused, done = outcome.calls
    assert (refused.status, refused.text) == (
        CallStatus.UNKNOWN_TOOL,
        "Error: there is no tool 'put'; the tools are: take",
    )
    assert (done.status, done.text) == (CallStatus.OK, "put: there")
    schema = json.dumps(hidden.tool_schema.as_dict(), ensure_ascii=False)
    users = [message["content"] for message in outcome.messages if message["role"] == "user"]
    assert users == ["Put it there.", "Wait.", f"You may put now.\n\n{schema}"]
    text = "".join(part for _, part in transcript(outcome))
    assert schema not in text[: text.index("Wait.")]
    assert '"name": "take"' in text[: text.index("Wait.")]
    assert text.count(schema) == 1
    assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE
    assert outcome.differences == []  # the template writes the whole conversation as the model saw it


async def test_the_same_answer_as_to_a_tool_that_does_not_exist() -> None:
    outcome = await play(
        Reply(done=True), turns=[put(), tool_call("nothing", {"place": "x"}), "Bye."], take={"shown": False}
    )
    assert [result.text for result in outcome.calls] == [
        "Error: there is no tool 'put'; the tools are: none",
        "Error: there is no tool 'nothing'; the tools are: none",
    ]


async def test_what_is_shown_already_is_not_written_again() -> None:
    outcome = await play(
        Reply("", shows=("put", "take")), Reply("Again.", shows=["put"]), Reply(done=True), turns=["a", "b", "c"]
    )
    first, second = [message["content"] for message in outcome.messages if message["role"] == "user"][1:]
    assert first == json.dumps(Named("put").tool_schema.as_dict(), ensure_ascii=False)
    assert second == "Again."


async def test_the_schemas_come_on_top_of_the_users_limit() -> None:
    limits = Limits(prompt_length=8192, response_length=8192, user_turn_length=4)
    outcome = await play(Reply("many words " * 40, shows=["put"]), Reply(done=True), turns=["a", "b"], limits=limits)
    text = outcome.messages[-2]["content"]
    assert len(text.partition("\n\n")[0]) < 40
    assert json.loads(text.partition("\n\n")[2])["function"]["name"] == "put"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (
            Reply(shows=["pit"]),
            "reply shows the tool 'pit', which the row does not have; its tools are ['put', 'take']",
        ),
        (Reply(shows="put"), "whose shows is 'put'; give a list of names of tools"),
        (Reply(shows=[3]), "whose shows is [3]; give a list of names of tools"),  # type: ignore[list-item]  # wrong
        (Reply(shows=["pit"], done=True), "reply shows the tool 'pit'"),
    ],
)
async def test_a_wrong_name_is_the_authors_mistake(reply: Reply, said: str) -> None:
    with pytest.raises(InteractionContractError) as caught:
        await play(reply, turns=["a"])
    assert said in str(caught.value)


async def test_the_opening_shows_nothing() -> None:
    class Opens(Says):
        def start(self, instance_id: str, **kwargs: Any) -> Reply:
            return Reply("Hello.", shows=["put"])

    with pytest.raises(InteractionContractError, match="is shown by reply"):
        await scripted_rollout(
            [Named("put")], ["a"], "Go.", tools_kwargs={"put": {"shown": False}}, interaction=Opens()
        )


async def test_a_hidden_tool_needs_an_interaction() -> None:
    said = r"tools_kwargs\['put'\]\['shown'\] is False, and the row has no interaction"
    with pytest.raises(ConfigError, match=f"scripted_rollout: {said}"):
        await scripted_rollout([Named("put")], ["a"], "Go.", tools_kwargs={"put": {"shown": False}})
    row = {"extra_info": {"tools_kwargs": {"put": {"shown": False}, "take": {"shown": None}}}}
    with pytest.raises(ConfigError, match=f"row 3: {said}"):
        interaction_of_row(row, {}, "row 3")
    says = Says()
    assert interaction_of_row(row, {"says": says}, "row 3") == (says, {})
    assert interaction_of_row({"extra_info": {"tools_kwargs": {"put": {"shown": True}}}}, {}, "row") == (None, {})


def test_what_a_row_says_of_it() -> None:
    read = read_tools_kwargs({"a": {"shown": False, "create_kwargs": None}, "b": {"shown": None}}, "row")
    assert read == {"a": {"shown": False}, "b": {}}
    with pytest.raises(ConfigError, match=r"tools_kwargs\['a'\]\['shown'\] must be True or False, got 'no'"):
        read_tools_kwargs({"a": {"shown": "no"}}, "row")


ONE, TWO = (make_schema(name, place="string").as_dict() for name in ("one", "two"))
JSON = f"{json.dumps(ONE)}\n{json.dumps(TWO)}"


def as_lines(schemas: Sequence[Any]) -> str:
    return "<tools>\n" + "\n".join(json.dumps(each, sort_keys=True) for each in schemas) + "\n</tools>\nx"


def as_list(schemas: Sequence[Any]) -> str:
    return f"[TOOLS]{json.dumps(list(schemas))}[/TOOLS]x"


def as_types(schemas: Sequence[Any]) -> str:
    names = "".join(
        f"// {each['function']['name']}\ntype {each['function']['name']} = () => any;\n\n" for each in schemas
    )
    return f"namespace functions {{\n\n{names}}}\nx"


def as_names_and_lines(schemas: Sequence[Any]) -> str:
    return f"{[each['function']['name'] for each in schemas]}\n{as_lines(schemas)}"


def failing(schemas: Sequence[Any]) -> str:
    raise ValueError("no tools")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (as_lines, f"{json.dumps(ONE, sort_keys=True)}\n{json.dumps(TWO, sort_keys=True)}"),
        (as_list, f"{json.dumps(ONE)}, {json.dumps(TWO)}"),
        (as_types, "// one\ntype one = () => any;\n\n// two\ntype two = () => any;"),
        (as_names_and_lines, JSON),  # in two places
        (lambda schemas: "x", JSON),
        (lambda schemas: f"{len(schemas)} tools", JSON),
        (lambda schemas: as_lines(schemas).replace('"one"', '"eno"'), JSON),
        (failing, JSON),
    ],
)
def test_schemas_are_written_as_the_template_does_or_as_json(prompt: Any, text: str) -> None:
    assert announcement([ONE, TWO], prompt, lambda piece: piece) == text


def test_a_control_token_in_what_the_template_writes_is_not_taken() -> None:
    def prompt(schemas: Sequence[Any]) -> str:
        return "".join(f"<|tool|>{json.dumps(each)}" for each in schemas) + "x"

    assert announcement([ONE, TWO], prompt, lambda piece: piece.replace("<|tool|>", "<|tool |>")) == JSON


def test_a_codec_whose_template_shows_no_tools_writes_json() -> None:
    assert ChatCodec(CharBuilder(), tokenizer=CharTokenizer()).announcement([ONE, TWO]) == JSON
    assert ChatCodec(CharBuilder()).announcement([ONE]) == json.dumps(ONE)
