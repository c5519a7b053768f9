"""The oracle of `benchmarks.rows`: the words of a row, and whether a prompt shows them.

Invariants:
- It shares no code with the product. It reads the row as its author wrote it, and the prompt as the engine gets it.
- It knows each family's marks of turns and calls by itself, from the family's template.
- A finding names the place in the row and the part of the prompt.

What a row says is the text of each message, names and arguments of calls, answers of tools, names and descriptions of
tools, and BOS where the template writes one. Ids of calls, names of speakers and reasoning are not said.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Message = Mapping[str, Any]

Nulls = Literal["said", "perhaps", "never"]
"""A null in a JSON text was said. In a mapping perhaps. In a column of a parquet file it stands for what is not there."""
MARK = re.compile(r"zq\d+x")
"""Words that occur once in all rows of the benchmark."""
REASONING = ("reasoning_content", "reasoning", "thinking")
SYSTEM = ("system", "developer")
_BREAK = "\u200b"
_CHATML = {
    r"<\|im_start\|>(system|developer|user|assistant|tool)": "",
    r"<tool_response>|<\|tool_response_start\|>": "tool",
}
_LLAMA = {
    r"<\|start_header_id\|>(system|developer|user|assistant|tool)": "",
    r"<\|start_header_id\|>ipython": "tool",
}
_DEEPSEEK = {
    r"<｜User｜>": "user",
    r"<｜Assistant｜>|<｜tool▁outputs▁end｜>": "assistant",
    r"<｜tool▁output▁begin｜>": "tool",
}
_HEADERS: dict[str, dict[str, str]] = {
    "llama3": _LLAMA,
    "llama3.1": _LLAMA,
    "llama3.2": _LLAMA,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1-distill": _DEEPSEEK,
    "glm4-moe": {r"<\|(system|user|assistant)\|>": "", r"<\|observation\|>|<tool_response>": "tool"},
    "gpt-oss": {r"<\|start\|>(system|developer|user|assistant)": "", r"<\|start\|>functions": "tool"},
    "gemma3": {r"<start_of_turn>(user)": "", r"<start_of_turn>model": "assistant"},
    "gemma4": {
        r"<\|turn>(system|developer|user)": "",
        r"<\|turn>model|<tool_response\|>": "assistant",
        r"<\|tool_response>": "tool",
    },
    "cohere2": {r"<\|SYSTEM_TOKEN\|>": "system", r"<\|USER_TOKEN\|>": "user", r"<\|CHATBOT_TOKEN\|>": "assistant"},
    "phi3.5": {r"<\|(system|user|assistant)\|>": ""},
    "mistral": {
        r"\[SYSTEM_PROMPT\]": "system",
        r"\[INST\]": "user",
        r"\[/INST\]|\[/TOOL_RESULTS\]|\[/SYSTEM_PROMPT\]|</s>": "assistant",
        r"\[TOOL_RESULTS\]": "tool",
    },
}
"""What begins a turn of a role, by family: a pattern, and the role; "" where the pattern's group is the role. Others
write ChatML."""
_NO_SYSTEM = {"gemma3"}
"""Families whose template writes the system message into the user's first."""
_ANSWERS_AS_JSON = {"llama3.1", "llama3.2", "gpt-oss"}
"""Families whose template writes a tool's answer as a JSON text."""
_CONTENT_LAST = {"gemma4"}
"""Families whose template writes the text of a message with calls behind these calls and their answers."""
_JSON_CALL = re.compile(
    r'",\s*"(?:arguments|parameters)":\s*|\[ARGS\]|\n```json\n|<\|channel\|>commentary json<\|message\|>'
)
_TAGS = {
    "glm4-moe": (r"</tool_call>", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
    "qwen3_coder": (r"</function>", r"<parameter=(.*?)>\n(.*?)\n</parameter>"),
}
_LEAVES = {"lfm2": "<|tool_call_end|>", "lfm2.5": "<|tool_call_end|>", "gemma4": "<tool_call|>"}
_NOTHING = re.compile(r"(?<![\w.])(?:null|None|undefined)(?!\w)")
_OTHER_FORM = re.compile(r"\{'(?:type|text|role|content|name|arguments|id)'|\"type\": ?\"(?:text|input_text)\"|dtype=")


@dataclass(frozen=True)
class Said:
    """Something that a row says, in the order of the row."""

    where: str
    """Place in the row, for example "message 2, content"."""
    roles: frozenset[str]
    """The roles in whose turns a prompt may show it."""
    kind: Literal["text", "name", "arguments"]
    value: Any
    """A text, or a mapping of arguments."""
    nulls: Nulls = "said"
    """Whether a null in the arguments was said."""
    encoded: bool = False
    """Whether the text may stand in the prompt as a JSON text has it."""


def words_of(messages: Sequence[Any], family: str, nulls: Nulls = "perhaps") -> list[Said]:
    """Return what the messages of a row say, in the order in which the family's template shows it.

    Args:
        messages: The messages as their author wrote them.
        family: Name of the family.
        nulls: Whether nulls in arguments that are a mapping were said.
    """
    found: list[Said] = []
    held: list[Said] = []
    leading = True
    for index, message in enumerate(messages):
        role = str(message.get("role"))
        leading = leading and role in SYSTEM
        where, roles = f"message {index}", _roles(role, leading, family)
        encoded = role == "tool" and family in _ANSWERS_AS_JSON
        content = [
            Said(f"{where}, {key}", roles, "text", text, encoded=encoded or not plain)
            for key, text, plain in _texts(message, role)
        ]
        calls = list(_calls(message, where, roles, nulls))
        if role != "tool":
            found, held = [*found, *held], []
        late = family in _CONTENT_LAST and bool(calls)
        found += [*calls] if late else [*content, *calls]
        held += content if late else []
    return [*found, *held]


def _roles(role: str, leading: bool, family: str) -> frozenset[str]:
    if role not in SYSTEM:
        return frozenset([role])
    return frozenset([*SYSTEM, "user"] if not leading or family in _NO_SYSTEM else SYSTEM)


def _texts(message: Message, role: str) -> Iterator[tuple[str, str, bool]]:
    """Yield key, text and whether the text stands plainly in a message, for each text that it says."""
    content = message.get("content")
    keys = [key for key in message if key not in ("role", "content", "tool_calls", "function_call", *REASONING)]
    if content is None and not message.get("tool_calls") and not message.get("function_call"):
        others = [key for key in keys if key not in ("name", "tool_call_id", "id")]
        yield from ((key, text, False) for key in others for text in _leaves(message[key]))
    elif message.get("refusal"):
        yield "refusal", str(message["refusal"]), True
    if isinstance(content, str):
        yield from (("content", text, True) for text in _without_reasoning(content, role))
    elif isinstance(content, list | tuple):
        for block in content:
            if isinstance(block, str):
                yield "content", block, True
            elif isinstance(block, Mapping) and isinstance(block.get("text"), str):
                yield from (("content", text, True) for text in _without_reasoning(block["text"], role))
            elif not isinstance(block, Mapping) or block.get("type") not in ("thinking", "reasoning"):
                yield from (("content", text, False) for text in _leaves(block))
    else:
        yield from (("content", text, False) for text in _leaves(content))


def _without_reasoning(text: str, role: str) -> list[str]:
    pieces = re.split(r"<think>.*?</think>", text, flags=re.DOTALL) if role == "assistant" else [text]
    return [piece for piece in pieces if piece.strip()]


def _leaves(value: Any) -> Iterator[str]:
    """Yield each text and number in a value that is no text, without a block's `type`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from () if key == "type" else _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None and str(value).strip():
        yield json.dumps(value) if isinstance(value, bool) else str(value)


def _calls(message: Message, where: str, roles: frozenset[str], nulls: Nulls) -> Iterator[Said]:
    calls = message.get("tool_calls")
    if isinstance(calls, str | Mapping):
        yield from (Said(f"{where}, tool_calls", roles, "text", text, encoded=True) for text in _leaves(calls))
        calls = None
    old = message.get("function_call")
    for number, call in enumerate([*(calls or ()), *([old] if old else [])]):
        if not isinstance(call, Mapping):
            yield from (Said(f"{where}, call {number}", roles, "text", text, encoded=True) for text in _leaves(call))
            continue
        function = call.get("function") or call
        at = f"{where}, call {number}"
        named = function.get("name")
        if isinstance(named, str) and named:
            yield Said(f"{at}, name", roles, "name", named)
        else:
            yield from (Said(f"{at}, name", roles, "text", text, encoded=True) for text in _leaves(named))
        raw = function.get("arguments")
        read = _read(raw)
        if isinstance(read, Mapping):
            yield Said(f"{at}, arguments", roles, "arguments", read, "said" if isinstance(raw, str) else nulls)
        else:
            yield from (Said(f"{at}, arguments", roles, "text", text, encoded=True) for text in _leaves(raw))


def _read(raw: Any) -> Any:
    """Return arguments as a mapping; text that is none, and other values, as they are."""
    if raw is None or raw == "":
        return {}
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def faults(
    prompt: str,
    family: str,
    format_name: str | None,
    said: Sequence[Said],
    schemas: Sequence[Mapping[str, Any]],
    row_marks: Iterable[str],
    plain: str,
) -> list[str]:
    """Return what is wrong with a prompt, each as "place: what (part of the prompt)"; empty where it shows all.

    Args:
        prompt: The prompt, decoded with its control tokens.
        family: Name of the family.
        format_name: The family's format of calls.
        said: As `words_of` returns it.
        schemas: The tools of the row.
        row_marks: All marks of the row, also those of what is not said.
        plain: What the template writes for a user's "x" with these tools, which tells BOS and words of its own.
    """
    shown, headers = _without_breaks(prompt, family)
    said = [replace(each, value=_plain(each.value)) for each in said]
    found: list[str] = []
    cursor = 0
    for each in said:
        start, cursor, problem = _look(shown, each, cursor, family, format_name)
        if not problem and start >= 0 and (role := _role_at(headers, start)) not in each.roles:
            problem = f"stands in a turn of {role!r}"
        if problem:
            found.append(f"{each.where}: {problem} (…{shown[max(0, cursor - 40) : cursor + 120]!r}…)")
    found += _counts(shown, said)
    found += _tools(shown, schemas)
    found += _traces(shown, said, row_marks, schemas, plain)
    if headers and headers[-1][1] != "assistant":
        found.append(f"the end: the prompt ends in a turn of {headers[-1][1]!r} (…{shown[-80:]!r})")
    return found


def _without_breaks(prompt: str, family: str) -> tuple[str, list[tuple[int, str]]]:
    """Return the prompt without the firewall's zero-width spaces, and where turns of roles begin in it."""
    marks: list[tuple[int, str]] = []
    for pattern, role in _HEADERS.get(family, _CHATML).items():
        for match in re.finditer(pattern, prompt):
            before = prompt[: match.end()].replace(_BREAK, "")
            marks.append((len(_plain(before)), role or match[1]))
    return _plain(prompt.replace(_BREAK, "")), sorted(marks)


def _plain(value: Any) -> Any:
    """Return a text in the form in which two texts are compared; other values with all their texts so."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.replace(_BREAK, ""))
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _role_at(headers: Sequence[tuple[int, str]], position: int) -> str:
    before = [role for start, role in headers if start <= position]
    return before[-1] if before else "system"


def _look(
    shown: str, said: Said, cursor: int, family: str, format_name: str | None
) -> tuple[int, int, str]:
    """Look for something from a position on.

    Returns:
        Where it begins (-1: it was not found), from where to look for the next, and what is wrong; "" for nothing.
    """
    if said.kind == "arguments":
        end, problem = _arguments(shown, said, cursor, family, format_name)
        return -1, end, problem
    for form in _forms(said):
        start = shown.find(form, cursor)
        if start >= 0:
            return start, start + len(form), ""
        if form in shown:
            return -1, cursor, f"{form[:60]!r} stands before what was said earlier"
    return -1, cursor, f"{said.value.strip()[:60]!r} is not in the prompt"


def _forms(said: Said) -> list[str]:
    text = said.value.strip()
    return [text, *_as_json(text)] if said.encoded else [text]


def _as_json(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]]


def _arguments(shown: str, said: Said, start: int, family: str, format_name: str | None) -> tuple[int, str]:
    """Compare the arguments behind a call's name with those that were said; return where they end, and the problem."""
    if family in _LEAVES:
        end = shown.find(_LEAVES[family], start)
        region = shown[start : end if end >= 0 else None]
        missing = [leaf for leaf in _with_keys(said.value) if not any(form in region for form in _literals(leaf))]
        return start, f"the arguments {missing[:3]} are not in {region[:160]!r}" if missing else ""
    tags = _TAGS.get(family) or _TAGS.get(format_name or "")
    if tags:
        end = shown.find(tags[0], start)
        region = shown[start : end if end >= 0 else start]
        given: Any = {key.strip(): text for key, text in re.findall(tags[1], region, re.DOTALL)}
        same = any(_same_tags(said, variant, given) for variant in _variants(said))
        return max(end, start), "" if same else f"the arguments {said.value!r:.120} are shown as {region[:160]!r}"
    opened = _JSON_CALL.match(shown, start)
    if opened is None:
        return start, f"no arguments stand behind the call's name, but {shown[start : start + 60]!r}"
    try:
        given, end = json.JSONDecoder().raw_decode(shown, opened.end())
    except ValueError:
        return start, f"the arguments cannot be read: {shown[opened.end() : opened.end() + 120]!r}"
    same = isinstance(given, dict) and any(_equal(said, variant, given) for variant in _variants(said))
    return end, "" if same else f"the arguments {said.value!r:.120} are shown as {given!r:.120}"


def _equal(said: Said, variant: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Compare arguments and their order; in a parquet file all rows have the same order."""
    return variant == given and (said.nulls == "never" or list(variant) == list(given))


def _variants(said: Said) -> list[dict[str, Any]]:
    """Return the arguments that a prompt may show."""
    without = _without_nulls(said.value)
    return {"said": [dict(said.value)], "perhaps": [dict(said.value), without], "never": [without]}[said.nulls]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _same_tags(said: Said, arguments: Mapping[str, Any], given: Mapping[str, str]) -> bool:
    """Compare arguments with texts between tags: a text stands as it is, anything else as JSON or as a Python word."""
    if set(arguments) != set(given) or (said.nulls != "never" and list(arguments) != list(given)):
        return False
    for key, value in arguments.items():
        text = given[key]
        if isinstance(value, str):
            if value.strip() != text.strip():
                return False
        elif text.strip() != str(value) or isinstance(value, Mapping | list):
            try:
                if json.loads(text) != value:
                    return False
            except ValueError:
                return False
    return True


def _with_keys(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if item is not None:
                yield key
                yield from _with_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _with_keys(item)
    elif value is not None:
        yield value


def _literals(leaf: Any) -> list[str]:
    """Return the ways in which a text or number may stand in a call that is written as Python or in Gemma's way."""
    if isinstance(leaf, str):
        quoted = leaf.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
        return [leaf, quoted, repr(leaf)[1:-1], *_as_json(leaf)]
    return [str(leaf), json.dumps(leaf)]


def _counts(shown: str, said: Sequence[Said]) -> Iterator[str]:
    texts = Counter(each.value.strip() for each in said if each.kind == "text" and MARK.search(each.value))
    for text, times in texts.items():
        forms = {text, *_as_json(text)}
        count = max(shown.count(form) for form in forms)
        if count > times or (count and count < times):
            yield f"{text[:60]!r}: said {times} times, shown {count} times"


def _tools(shown: str, schemas: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for schema in schemas:
        function = schema["function"]
        name = function["name"]
        words = {"name": name, "description": function.get("description") or ""}
        for argument, value in (function.get("parameters") or {}).get("properties", {}).items():
            words |= {f"argument {argument!r}": argument, f"description of {argument!r}": value.get("description", "")}
        for what, text in words.items():
            text = _plain(text).strip()
            if text and not any(form in shown for form in [text, *_as_json(text)]):
                yield f"tool {name!r}: its {what} {text[:60]!r} is not in the prompt"


def _traces(
    shown: str, said: Sequence[Said], row_marks: Iterable[str], schemas: Sequence[Mapping[str, Any]], plain: str
) -> Iterator[str]:
    """Yield what a prompt has that nobody said: BOS twice or never, nulls, Python, words of other rows."""
    own = json.dumps([each.value for each in said], ensure_ascii=False)
    if other := _OTHER_FORM.search(shown):
        if not _OTHER_FORM.search(own.replace('\\"', '"')):
            yield f"another form: {shown[max(0, other.start() - 20) : other.end() + 60]!r}"
    nothing = _NOTHING.findall(shown)
    if len(nothing) > len(_NOTHING.findall(own)) + len(_NOTHING.findall(plain)):
        at = [match.start() for match in _NOTHING.finditer(shown)][-1]
        yield f"a null that was not said: {shown[max(0, at - 60) : at + 20]!r}"
    known = {*row_marks, *MARK.findall(json.dumps(schemas))}
    if foreign := sorted(set(MARK.findall(shown)) - known):
        at = shown.find(foreign[0])
        yield f"words of another row: {shown[max(0, at - 60) : at + 40]!r}"
    begins = re.match(r"(?:<bos>|<s>|<BOS_TOKEN>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|<\|startoftext\|>)+", plain)
    if begins and not shown.startswith(begins[0]):
        yield f"BOS: the prompt begins with {shown[:40]!r}"
    if begins and shown.startswith(begins[0] * 2):
        yield f"BOS twice: {shown[:60]!r}"
