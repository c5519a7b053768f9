"""Bodies of the three protocols as `ChatRequest`s, in literal messages; and bodies that are refused."""

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.harness_requests import PROGRAMS, recorded
from verl_multiturn.proxy.protocols import PROTOCOLS, chat_completions
from verl_multiturn.proxy.protocols.fields import MOST_MESSAGES, MOST_TOOLS
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError
from verl_multiturn.proxy.protocols.validation import MOST_DEPTH

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PNG = base64.b64encode(b"\x89PNG").decode()
IMAGE = {"type": "image", "image": f"data:image/png;base64,{PNG}"}
USER = {"role": "user", "content": "x"}


def read(path: str, **body: Any) -> ChatRequest:
    default = {"input": "x"} if path == RESPONSES else {"messages": [USER]}
    return PROTOCOLS[path].read({"model": "policy", **default, **body})


def refused(path: str, **body: Any) -> str:
    with pytest.raises(RefusedError) as raised:
        read(path, **body)
    assert (raised.value.status, raised.value.code) == (400, "invalid_request_error")
    return raised.value.message


def call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def program(name: str, index: int) -> ChatRequest:
    path, body = recorded(name)[index]
    return PROTOCOLS[path].read(body)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_recorded_body_is_read(name: str) -> None:
    for path, body in recorded(name):
        before = copy.deepcopy(body)
        request = PROTOCOLS[path].read(body)
        assert body == before
        assert request.model == "policy"
        assert request.stream is body.get("stream", False)
        assert request.messages
        assert all(set(tool) == {"type", "function"} for tool in request.tools)
        assert all(set(tool["function"]) <= {"name", "description", "parameters"} for tool in request.tools)


def test_a_chat_body_of_an_agent() -> None:
    request = program("agents_chat", 1)
    assert request.messages == [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "text"},
        {"role": "assistant", "content": "", "tool_calls": [call("call_0", "add", '{"a": 2, "b": 3}')]},
        {"role": "tool", "content": "5", "tool_call_id": "call_0"},
    ]
    assert request.tools[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
                "required": ["a", "b"],
                "title": "add_args",
                "type": "object",
                "additionalProperties": False,
            },
        },
    }
    assert request.unenforced == []


def test_parts_of_a_chat_become_one_text() -> None:
    request = program("smol_tool", 1)
    assert [(each["role"], each["content"]) for each in request.messages] == [
        ("system", "text-de867f17 text-de867"),
        ("user", "text-429617f1"),
        ("assistant", "text-fafc4aa4 text-fafc4"),
        ("user", "text-0ddffc74"),
    ]
    assert request.stop == ("Observation:", "Calling tools:")
    assert request.unenforced == ["tool_choice"]
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(CHAT, messages=[{"role": "user", "content": two}]).messages[0]["content"] == "a\nb"


def test_a_body_of_codex() -> None:
    request = program("codex", 1)
    assert [each["role"] for each in request.messages] == [
        "developer", "developer", "user", "user", "assistant", "tool",
    ]  # fmt: skip
    assert request.messages[1]["content"] == "text-4ffa2e28 text-4ffa2\ntext-681b5ba5 text-681b5"
    assert request.messages[4:] == [
        {"role": "assistant", "content": "", "tool_calls": [call("call_1", "exec_command", '{"cmd": "echo hi"}')]},
        {"role": "tool", "content": "text-6149fedb text-6149f", "tool_call_id": "call_1"},
    ]
    assert [tool["function"]["name"] for tool in request.tools] == [
        "exec_command", "write_stdin", "request_user_input", "view_image", "get_goal", "create_goal", "update_goal",
    ]  # fmt: skip
    assert request.unenforced == ["tools.namespace", "tools.web_search"]
    assert request.stream
    compaction = program("codex_compact", 1)
    assert compaction.tools == []
    assert compaction.unenforced == ["parallel_tool_calls"]


def test_a_body_of_claude_code() -> None:
    request = program("claude_agent", 2)
    assert request.messages == [
        {"role": "system", "content": "text-ed8704df text-ed870\ntext-0d706285 text-0d706\ntext-99e3f67e text-99e3f"},
        {"role": "user", "content": "text-b83fb805 text-b83fb\ntext-63c91377 text-63c91"},
        {"role": "system", "content": "text-d3f8112f text-d3f81"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                call(
                    "toolu_0",
                    "Agent",
                    '{"description": "add", "prompt": "text-f574924", "subagent_type": "general-purpose"}',
                )
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_0", "content": "The answer is 5.\ntext-a9636822 text-a9636"},
    ]
    assert len(request.tools) == 24
    assert request.max_tokens == 32_000
    assert request.unenforced == ["thinking", "output_config", "context_management"]


def test_what_changes_in_claude_codes_system_prompt_is_left_out() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "Be brief"},
    ]
    assert read(MESSAGES, system=blocks).messages == [{"role": "system", "content": "Be brief"}, USER]
    assert read(MESSAGES, system=blocks[:1]).messages == [USER]


def test_an_assistant_message_of_the_messages_protocol() -> None:
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "…"},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "t1", "name": "a", "input": {"x": [1, "é"]}},
            {"type": "tool_use", "id": "t2", "name": "b", "input": {}},
            {"type": "server_tool_use", "id": "t3", "name": "web_search", "input": {}},
        ],
    }
    results = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": True},
            {"type": "tool_result", "tool_use_id": "t2"},
            {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        ],
    }
    request = read(MESSAGES, messages=[USER, turn, results])
    assert request.messages[1:] == [
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("t1", "a", '{"x": [1, "é"]}'), call("t2", "b", "{}")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, IMAGE]},
    ]
    assert request.unenforced == ["content.server_tool_use"]


def test_items_of_a_turn_become_one_message() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    def called(id_: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"}

    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "…"}
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "o"}]}
    items = [USER, thought, said("a"), called("1"), called("2"), output, hidden, called("3"), said("b"), said("c")]
    assert read(RESPONSES, input=items, instructions="Be brief").messages == [
        {"role": "system", "content": "Be brief"},
        USER,
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "Hm.",
            "tool_calls": [call("1", "f", "{}"), call("2", "f", "{}")],
        },
        {"role": "tool", "content": "o", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": [call("3", "f", "{}")]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]


def test_other_items_of_responses() -> None:
    action = {"type": "exec", "command": ["ls"]}
    items = [
        {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE["image"], "detail": "auto"}]},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** a"},
        {"type": "local_shell_call", "call_id": "2", "action": action, "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"},
        {"type": "local_shell_call_output", "call_id": "2", "output": "a b"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "Bad Kind"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
    ]
    request = read(RESPONSES, input=items)
    assert request.messages == [
        {"role": "user", "content": [IMAGE]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                call("1", "apply_patch", '{"input": "*** a"}'),
                call("2", "local_shell", '{"type": "exec", "command": ["ls"]}'),
            ],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
        {"role": "tool", "content": "a b", "tool_call_id": "2"},
        {"role": "assistant", "content": "", "reasoning_content": "So."},
    ]
    assert request.unenforced == ["input.web_search_call", "input.other"]


def test_reasoning_and_custom_calls_of_a_chat() -> None:
    custom = {"id": "1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [custom], "audio": None},
        {"role": "tool", "name": "sh", "content": "a"},
        {"role": "assistant"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    assert read(CHAT, messages=messages).messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [call("1", "sh", '{"input": "ls"}')],
        },
        {"role": "tool", "content": "a", "name": "sh"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (
            CHAT,
            {"temperature": 0.0, "top_p": 1, "seed": 7, "frequency_penalty": 0.5, "logit_bias": {}},
            ["temperature", "top_p", "seed", "frequency_penalty", "logit_bias"],
        ),
        (
            CHAT,
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            ["tool_choice", "response_format"],
        ),
        (
            CHAT,
            {"tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True, "user": "u"},
            [],
        ),
        (CHAT, {"tool_choice": "none"}, []),
        (
            CHAT,
            {"tools": [{"type": "web_search"}, {"type": "custom", "custom": {}}]},
            ["tools.web_search", "tools.custom"],
        ),
        (
            RESPONSES,
            {
                "temperature": 1.0,
                "text": {"format": {"type": "json_object"}, "verbosity": "low"},
                "reasoning": {"effort": "high", "summary": "auto"},
                "truncation": "auto",
                "tool_choice": "required",
            },
            ["temperature", "tool_choice", "truncation", "text.verbosity", "reasoning.effort", "text.format"],
        ),
        (
            RESPONSES,
            {"text": {"format": {"type": "text"}}, "store": True, "truncation": "disabled", "background": False},
            [],
        ),
        (
            MESSAGES,
            {"temperature": 1.0, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            ["temperature", "tool_choice", "tool_choice.disable_parallel_tool_use"],
        ),
        (
            MESSAGES,
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124"}]},
            ["tools.web_search_20250305", "tools.bash_20250124"],
        ),
        (MESSAGES, {"metadata": {"user_id": "u"}, "tool_choice": {"type": "none"}, "service_tier": "auto"}, []),
    ],
)
def test_what_is_not_enforced_is_named(path: str, body: dict[str, Any], names: list[str]) -> None:
    request = read(path, **body)
    assert request.unenforced == names
    assert request.tools == []


@pytest.mark.parametrize(("path", "choice"), [(CHAT, "none"), (RESPONSES, "none"), (MESSAGES, {"type": "none"})])
def test_no_calls_are_read_when_the_client_wants_none(path: str, choice: Any) -> None:
    assert not read(path, tool_choice=choice).reads_calls
    assert read(path).reads_calls


def test_limits_of_a_completion() -> None:
    assert read(CHAT, max_tokens=5).max_tokens == 5
    assert read(CHAT, max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert read(CHAT, max_tokens="x", max_completion_tokens=6).max_tokens == 6
    assert read(CHAT, max_tokens=-1).max_tokens == 1
    assert read(CHAT, max_tokens=7.0).max_tokens == 7
    assert read(RESPONSES, max_output_tokens=8).max_tokens == 8
    assert read(MESSAGES, max_tokens=None).max_tokens is None
    assert read(CHAT, n=3).n == 3
    assert read(CHAT, stop="a").stop == ("a",)
    assert read(CHAT, stop=["a", "b"], stream=True, stream_options={"include_usage": True}).include_usage
    assert read(MESSAGES, stop_sequences=["a"]).stop == ("a",)


def test_a_tool_has_name_description_and_parameters_only() -> None:
    function = {"name": "f", "parameters": None, "strict": True, "x": 1}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert read(CHAT, tools=[{"type": "function", "function": function, "y": 2}]).tools == [schema]
    assert read(RESPONSES, tools=[{"type": "function", **function}]).tools == [schema]
    described = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}, "x": 1}
    assert read(MESSAGES, tools=[described, {"type": "custom", "name": "g"}]).tools == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]


DEEP: Any = "x"
for _ in range(MOST_DEPTH + 1):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": []}, "messages: got [], expected a list with at least one message"),
        (CHAT, {"messages": None}, "messages: got None, expected a list"),
        (CHAT, {"messages": "x"}, "messages: got 'x', expected a list"),
        (CHAT, {"messages": [None]}, "messages[0]: got None, expected an object; send that"),
        (
            CHAT,
            {"messages": [{"role": "function", "content": "x"}]},
            "messages[0].role: got 'function', expected one of",
        ),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content: got 3, expected a text or a list"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "send other media as text"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "messages[0].content[0].image_url.url: got 'http://a/b', expected an image as data:image/png;base64,…; "
            "send the image itself; nothing is fetched",
        ),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,%"}]}
                ]
            },
            "expected base64",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
            "messages[0].tool_calls[0].function.name: got '', expected a name",
        ),
        (CHAT, {"messages": [USER] * (MOST_MESSAGES + 1)}, f"got {MOST_MESSAGES + 1} items, expected at most"),
        (CHAT, {"tools": [{"type": "x"}] * (MOST_TOOLS + 1)}, f"tools: got {MOST_TOOLS + 1} items, expected at most"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters: got [], expected an object",
        ),
        (CHAT, {"metadata": DEEP}, f"nested deeper than {MOST_DEPTH} levels"),
        (CHAT, {"n": 0}, "n: got 0, expected a number from 1 to 128"),
        (CHAT, {"n": "2"}, "n: got '2', expected a whole number"),
        (CHAT, {"n": True}, "n: got True, expected a whole number"),
        (CHAT, {"max_tokens": "9"}, "max_tokens: got '9', expected a whole number"),
        (CHAT, {"max_tokens": float("nan")}, "max_tokens: got nan, expected a whole number"),
        (CHAT, {"stop": [""]}, "stop[0]: got '', expected a text of 1 to 256 characters"),
        (CHAT, {"stop": 3}, "stop: got 3, expected a list"),
        (CHAT, {"stream": "yes"}, "stream: got 'yes', expected true or false"),
        (CHAT, {"functions": []}, "use tools and tool_choice"),
        (
            RESPONSES,
            {"previous_response_id": "resp_1"},
            "previous_response_id: got 'resp_1', expected nothing: responses are not stored here; send the whole input",
        ),
        (RESPONSES, {"background": True}, "background: got True"),
        (RESPONSES, {"input": []}, "input: got [], expected a text or a list with at least one message"),
        (
            RESPONSES,
            {"input": [{"type": "item_reference", "id": "i"}]},
            "input[0].id: got 'i', expected the id of an item that this session sent, and each at most once; "
            "send the item itself, store=false",
        ),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].id: got None, expected a text"),
        (RESPONSES, {"input": [{}]}, "input[0].type: got None, expected the name of an item's kind"),
        (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role: got 'tool'"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "send files as text",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url: got None, expected a text",
        ),
        (RESPONSES, {"text": "x"}, "text: got 'x', expected an object"),
        (
            MESSAGES,
            {"messages": [USER, {"role": "assistant", "content": "{"}]},
            "the beginning of a turn cannot be given",
        ),
        (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: got 'tool'"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
            "messages[0].content[0].source.type: got 'url', expected base64; nothing is fetched",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "media_type": "image/svg+xml", "data": ""}}
                        ],
                    }
                ]
            },
            "expected one of png, jpeg",
        ),
        (MESSAGES, {"system": [{"type": "image"}]}, "system[0].type: got 'image', expected text"),
        (MESSAGES, {"tools": [{"input_schema": {}}]}, "tools[0].name: got None, expected a name"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(path: str, body: dict[str, Any], message: str) -> None:
    assert message in refused(path, **body)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [0] * MOST_MESSAGES},
        {"messages": [{"role": "assistant", "tool_calls": [0] * 100_000}]},
        {"messages": [{"role": "user", "content": [0] * 100_000}]},
        {"messages": [USER], "stop": [0] * 100_000},
    ],
)
def test_reading_a_list_ends_with_its_first_wrong_item(body: dict[str, Any]) -> None:
    """A body of 8 MiB may hold four million wrong items, and pydantic would keep an error for each."""
    with pytest.raises(ValidationError) as raised:
        chat_completions._Body.model_validate(body)
    assert raised.value.error_count() == 1


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(
        [
            "text",
            "user",
            "assistant",
            "tool",
            "image_url",
            "function",
            "custom",
            "\ud800",
            "data:image/png;base64,",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "arguments", "function", "source", "image_url", "x"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def place(data: st.DataObject, body: dict[str, Any]) -> tuple[Any, Any]:
    """Draw a container in a body, and a key or an index of it."""
    container: Any = body
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(container[key], dict | list) or not container[key] or not data.draw(st.integers(0, 3)):
            return container, key
        container = container[key]


# The last request of a program has most kinds of messages. Of the tools a few are enough.
BODIES = [
    (path, {**body, "tools": body.get("tools", [])[-2:]}) for path, body in (recorded(name)[-1] for name in PROGRAMS)
]


@given(st.data())
def test_any_json_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    path, body = data.draw(st.sampled_from(BODIES))
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = place(data, body)
        change = data.draw(st.sampled_from(["replace", "delete", "nest", "double"]))
        if change == "replace":
            container[key] = data.draw(JSON)
        elif change == "delete" and len(body) > 1:
            del container[key]
        elif change == "nest":
            container[key] = [container[key]]
        elif isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        else:
            container[data.draw(st.sampled_from(["input", "tool_choice", "system", "stop", "n"]))] = container[key]
    try:
        request = PROTOCOLS[path].read(body)
    except RefusedError as error:
        refusal = error
    else:
        check(request)
        return
    assert refusal.status == 400
    assert json.dumps(PROTOCOLS[path].error(refusal))
    assert PROTOCOLS[path].error_events(refusal)


def check(request: ChatRequest) -> None:
    assert isinstance(request, ChatRequest)
    assert request.messages
    for message in request.messages:
        assert isinstance(message["content"], str | list)
        assert message["role"] in ("system", "developer", "user", "assistant", "tool")
        for each in message.get("tool_calls", ()):
            assert isinstance(each["function"]["arguments"], str)
    assert all(isinstance(name, str) and len(name) < 60 for name in request.unenforced)
