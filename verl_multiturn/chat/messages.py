"""Messages of a data row, read into one form, whatever wrote the row.

People's rows come from Parquet, JSONL, pandas and other people's data sets. The same conversation has many forms there:
arguments of calls as JSON text or as a mapping, text as blocks, arrays in the place of lists, nulls in the place of
missing values.

Invariants:
- `read_messages` returns the whole content of a row, or refuses it by message and field;
- equal conversations come out equal, in whatever form they were written;
- a null in a mapping is nothing, at every depth. Parquet gives each mapping the keys of all rows, with null where a row
  has none, so an author's null looks the same. In a list a null stays, and so does one in arguments that are
  JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.chat.images import check_media, is_image
from verl_multiturn.describe import did_you_mean, show
from verl_multiturn.errors import ConfigError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have. Most templates silently leave a message with another role out."""
SYSTEM_ROLES = frozenset({"system", "developer"})
_FIELDS = frozenset({"role", "content"})
_FIELDS_OF = {
    "tool": _FIELDS | {"tool_call_id", "name"},
    "assistant": _FIELDS | {"tool_calls", "reasoning_content"},
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text blocks, and the key of the text. `{"text": …}` without a type is one, too."""
_UNSAID = frozenset({"type", "cache_control"})
_MARGIN = 200


def further_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that its role does not have, such as a user's `name`; few templates show them."""
    known = _FIELDS_OF.get(message["role"], _FIELDS)
    return {field: value for field, value in message.items() if field not in known}


def plain(value: Any) -> Any:
    """Return a value of a row with lists for arrays, and without the nulls in its mappings, at every depth.

    Example: `{"a": 1, "b": None, "c": {"d": None}, "e": [None]}` becomes `{"a": 1, "c": {}, "e": [None]}`.
    """
    if hasattr(value, "tolist"):  # of numpy: an array, or one number
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def joined_texts(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return the content of a message from its texts and image blocks: one text where there is no image.

    Texts are joined by line ends, as templates that take one text only would have them.
    """
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def read_messages(given: Any, where: str, takes_images: bool = True) -> list[Message]:
    """Read the messages of a row.

    Args:
        given: The messages as they lie in the row.
        where: Name of the row in errors, for example `data row 7`.
        takes_images: Whether the model takes images. Video and audio are always refused.

    Returns:
        Messages with a role of `ROLES`, and a content that is text, or a list of blocks where it has images. The
        arguments of calls are mappings. `tool_calls` is never an empty list, and reasoning is `reasoning_content`.

    Raises:
        ConfigError: A message has an unknown role, is empty, or has a form that no template shows.
    """
    try:
        listed = plain(given)
    except RecursionError:
        raise ConfigError(f"{where}: 'prompt' is nested too deeply; write deep arguments as text") from None
    if not isinstance(listed, list) or not listed:
        raise ConfigError(
            f"{where}: 'prompt' must be a non-empty list of messages with a role and a content, got {show(given)}; "
            "write one (where an interaction speaks first, a system message: make_row(…, [], system=…))"
        )
    messages = [_message(message, f"{where}: message {index}", takes_images) for index, message in enumerate(listed)]
    _check_answers(messages, where)
    return _by_calls(messages)


def _message(message: Any, where: str, takes_images: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} is {show(message)}; expected a mapping with a role and a content")
    role = message.get("role")
    if role == "function":  # OpenAI's name of a tool, before there were several calls
        role = "tool"
    if role not in ROLES:
        hint = did_you_mean(str(role).lower(), ROLES) or "write one of these"
        raise ConfigError(f"{where} has the role {show(role, 100)}, expected one of {list(ROLES)}; {hint}")
    where = f"{where} ({role})"
    made: Message = {"role": role, "content": _content(message.get("content"), where, takes_images)}
    reasoning = _reasoning(message, where)
    calls = _calls(message, where)
    if role != "assistant":
        for field, value in (("reasoning", reasoning), ("tool_calls", calls)):
            if value:
                raise ConfigError(
                    f"{where}: {field} of {show(value)}, which only an assistant's message has; leave it out, or "
                    "mend the role"
                )
    if made["content"] is None:
        if not (calls or reasoning or role == "tool"):
            raise ConfigError(f"{where} has no content (a text or a list of blocks); write one, or leave it out")
        made["content"] = ""
    made |= {"reasoning_content": reasoning} if reasoning else {}
    made |= {"tool_calls": calls} if calls else {}
    if role == "tool":
        for field in ("tool_call_id", "name"):
            if message.get(field) not in (None, ""):
                made[field] = _text(message[field], f"{where}: {field}")
    read = {"id", "function_call", "tool_calls", *_REASONING}
    more = {
        field: value
        for field, value in further_fields({**message, "role": role}).items()
        if field not in read and value not in ("", [], {})
    }
    return made | more


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {show(value)}; expected a text")
    return value


def _content(content: Any, where: str, takes_images: bool) -> Any:
    """Return a content as text, or as blocks where it has images; None where there is none."""
    if content is None or isinstance(content, str):
        return content
    blocks = [content] if isinstance(content, Mapping) else content
    if not isinstance(blocks, list):
        raise ConfigError(f"{where}: content is {show(content)}; expected a text or a list of blocks")
    # A text's `image_url: {}` comes from the keys that Parquet gives it.
    blocks = [
        {key: value for key, value in block.items() if value != {}} if isinstance(block, Mapping) else block
        for block in blocks
    ]
    check_media([{"content": blocks}], where, takes_images)
    return joined_texts([_block(block, f"{where}: content[{index}]") for index, block in enumerate(blocks)])


def _block(block: Any, where: str) -> Any:
    """Return the text of a block, or the block of an image."""
    if isinstance(block, str) or is_image(block):
        return block
    kind = block.get("type", "text") if isinstance(block, Mapping) else None
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None or not isinstance(block.get(key), str):
        raise ConfigError(f"{where} is {show(block)}; expected a block of text or an image, such as {_EXAMPLE}")
    more = {name: value for name, value in block.items() if name not in (key, *_UNSAID) and value not in ("", [], {})}
    if more:
        name = next(iter(more))
        raise ConfigError(f"{where} has {name}={show(more[name])}, which no template shows; leave it out")
    return block[key]


_EXAMPLE = '{"type": "text", "text": "…"}'


def _reasoning(message: Mapping[str, Any], where: str) -> str:
    found = {message[key]: key for key in _REASONING if isinstance(message.get(key), str) and message[key].strip()}
    wrong = next((key for key in _REASONING if not isinstance(message.get(key, ""), str)), None)
    if wrong is not None and message[wrong]:
        raise ConfigError(f"{where}: {wrong} is {show(message[wrong])}; expected a text")
    if len(found) > 1:
        raise ConfigError(f"{where}: {' and '.join(found.values())} differ; keep one of them")
    return next(iter(found), "")


def _calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    old = message.get("function_call") or None
    if not isinstance(calls, list):
        raise ConfigError(f"{where}: tool_calls is {show(calls)}; expected a list of calls")
    if old is None:
        return [_call(call, f"{where}: tool_calls[{index}]") for index, call in enumerate(calls) if call is not None]
    if calls:
        raise ConfigError(f"{where}: it has tool_calls and function_call; keep one of them")
    return [_call({"function": old}, f"{where}: function_call")]


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a call in the form of OpenAI's, with a mapping of arguments."""
    if not isinstance(call, Mapping):
        raise ConfigError(f"{where} is {show(call)}; expected a mapping with a function")
    function = call.get("function", {key: value for key, value in call.items() if key in ("name", "arguments")})
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{where} names no function: {show(call)}; write function.name")
    if call.get("type", "function") != "function":
        raise ConfigError(f"{where} has the type {show(call['type'])}; expected 'function'")
    outer = {"id", "type", "index", *(("function",) if "function" in call else ("name", "arguments"))}
    for path, given, known in (("", call, outer), ("function.", function, {"name", "arguments"})):
        for key, value in given.items():
            if key not in known and value not in ("", [], {}):
                raise ConfigError(f"{where}: {path}{key}={show(value)} is no part of a call; leave it out")
    arguments = _arguments(function.get("arguments"), f"{where}: function.arguments")
    made = {"id": _text(call["id"], f"{where}: id")} if call.get("id") not in (None, "") else {}
    return {**made, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a call as a mapping."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given, object_pairs_hook=_once, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where} is {show(given)}, which is no JSON ({error}); write a JSON object, or a mapping"
            ) from None
        found = {} if found is None else found
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {show(given)}, which is no JSON object; write one, or a mapping")
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is {show(given)}, which JSON cannot hold ({error}); write it as text") from None
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands in it twice")
    return made


def _check_answers(messages: Sequence[Message], where: str) -> None:
    """Refuse a tool's answer that names another tool than the call which it answers."""
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        called = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and called is not None and message.get("name", called) != called:
            raise ConfigError(
                f"{where}: message {index} (tool): name={message['name']!r}, and the call {message['tool_call_id']!r} "
                f"that it answers is one of {called!r}; mend one of them"
            )


def _by_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the answers to several calls of a turn in the order of the calls.

    Only their ids assign answers to calls, and most templates show none: the model takes them by their order.
    """
    made: list[Message] = []
    places: dict[str, int] = {}
    first = 0
    for message in messages:
        if message["role"] != "tool":
            first = len(made) + 1
            calls = enumerate(message.get("tool_calls", ()))
            places = {call["id"]: index for index, call in calls if "id" in call}
        made.append(message)
        ids = [each.get("tool_call_id") for each in made[first:]]
        if len(set(ids)) == len(ids) and places.keys() >= set(ids):
            made[first:] = sorted(made[first:], key=lambda each: places[each["tool_call_id"]])
    return made


def check_last_speaker(messages: Sequence[Mapping[str, Any]], has_user: bool, where: str) -> None:
    """Refuse a row whose last message is the model's own, if only the model could continue it.

    Args:
        messages: The row's messages.
        has_user: Whether an interaction answers the last message, which is a greeting then.
        where: Name of the row in errors, for example `data row 7`.

    Raises:
        ConfigError: The row ends in an assistant's message.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return
    calls = last.get("tool_calls")
    if calls is not None and len(calls):
        raise ConfigError(
            f"{where} ends in the assistant's calls, and nothing answers them; add the messages of the tools, or "
            "leave the calls out"
        )
    if not has_user:
        raise ConfigError(
            f"{where} ends in the assistant's answer; leave it out, or put it into reward_model.ground_truth"
        )


def written_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages in the form that a file keeps as it is: the arguments of calls are JSON text.

    A Parquet column has one type, so that mappings of arguments would get the keys of all rows.

    Args:
        messages: An author's messages. Values in another form than a call's stay as they are.
    """
    return [_written(dict(message)) for message in messages]


def _written(message: Message) -> Message:
    made = {
        key: value
        for key, value in message.items()
        if value is not None and not (key == "tool_calls" and not len(value))
    }
    if isinstance(made.get("tool_calls"), list | tuple):
        made["tool_calls"] = [_written_call(call) for call in made["tool_calls"]]
    if isinstance(made.get("function_call"), Mapping):
        made["function_call"] = _written_function(made["function_call"])
    return made


def _written_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _written_function(call["function"])}
    return _written_function(call)


def _written_function(function: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(function.get("arguments"), Mapping):
        return dict(function)
    try:
        return {**function, "arguments": json.dumps(plain(function["arguments"]), ensure_ascii=False)}
    except (TypeError, ValueError, RecursionError):  # `read_messages` refuses it by name
        return dict(function)
