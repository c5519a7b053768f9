"""The oracle of `benchmarks.rows`: whether a prompt shows the content of a data row, and nothing else.

Invariants:
- It shares no code with the product. It reads the prompt as the engine gets it.
- It knows each family's marks of turns and calls by itself, from the family's template.
- A fault names the place in the row and the part of the prompt.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal
from typing import Any

from tests.long.tokens.row_words import MARK, Said

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
    "gemma3": {r"<start_of_turn>(user|tool)": "", r"<start_of_turn>model": "assistant"},
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
        r"\[/INST\]|\[/TOOL_RESULTS\]|\[/SYSTEM_PROMPT\]|</s>|^<s>": "assistant",
        r"\[TOOL_RESULTS\]": "tool",
    },
}
"""Beginning of a turn of a role, by family: a pattern, and the role; "" where the pattern's group is the role. Others
write ChatML."""
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


def faults(
    prompt: str,
    family: str,
    format_name: str | None,
    said: Sequence[Said],
    schemas: Sequence[Mapping[str, Any]],
    row_marks: Iterable[str],
    plain: str,
) -> list[str]:
    """Return the errors in a prompt, each as "place: what (part of the prompt)"; empty where it shows all.

    Args:
        prompt: The prompt, decoded with its control tokens.
        family: Name of the family.
        format_name: The family's format of calls.
        said: Result of `words_of`.
        schemas: The tools of the row.
        row_marks: All marks of the row, also those of hidden parts.
        plain: The template's text for a user's "x" with these tools, which shows BOS and words of its own.
    """
    shown, headers = _without_breaks(prompt, family)
    said = [replace(each, value=_plain(each.value)) for each in said]
    found: list[str] = []
    cursor = 0
    for each in said:
        start, cursor, problem = _look(shown, each, cursor, family, format_name)
        # Brackets in an author's own text begin no turn.
        headers = [header for header in headers if not start < header[0] <= cursor or start < 0]
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
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, date | Decimal):
        return str(value) if isinstance(value, date) else float(value)
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _role_at(headers: Sequence[tuple[int, str]], position: int) -> str:
    before = [role for start, role in headers if start <= position]
    return before[-1] if before else "system"


def _look(shown: str, said: Said, cursor: int, family: str, format_name: str | None) -> tuple[int, int, str]:
    """Look for something from a position on.

    Returns:
        Where it begins (-1: it was not found), from where to look for the next, and the error; "" for nothing.
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
    """Compare the arguments behind a call's name with the row's; return where they end, and the problem."""
    if family in _LEAVES:
        end = shown.find(_LEAVES[family], start)
        region = shown[start : end if end >= 0 else None]
        missing = [_missing(variant, region) for variant in _variants(said)]
        return start, "" if [] in missing else f"the arguments {missing[0][:3]} are not in {region[:160]!r}"
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


def _without_empty(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_empty(item) if isinstance(item, Mapping) else item
        for key, item in arguments.items()
        if item != {}
    }


def _equal(said: Said, variant: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Compare arguments and their order; in a parquet file all rows have the same order."""
    same = variant == given or json.dumps(variant, default=str) == json.dumps(given)  # NaN differs from NaN
    return same and (said.nulls == "never" or list(variant) == list(given))


def _variants(said: Said) -> list[dict[str, Any]]:
    """Return the arguments that a prompt may show."""
    whole, without = dict(said.value), _without_nulls(said.value)
    # A column has a mapping without keys as one of nulls, which may as well mean none.
    bare = _without_nulls(_without_empty(without))
    return {"said": [whole], "perhaps": [whole, without], "never": [without, bare]}[said.nulls]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _same_tags(said: Said, arguments: Mapping[str, Any], given: Mapping[str, str]) -> bool:
    """Compare arguments with texts between tags: a text is as it is, anything else as JSON or as a Python word."""
    if set(arguments) != set(given) or (said.nulls != "never" and list(arguments) != list(given)):
        return False
    for key, value in arguments.items():
        text = given[key]
        if isinstance(value, str):
            if value.strip() != text.strip():
                return False
        elif text.strip() != str(value) or isinstance(value, Mapping | list):
            try:
                if (
                    json.dumps(json.loads(text)) != json.dumps(value, default=str) and json.loads(text) != value
                ):  # NaN differs from NaN
                    return False
            except ValueError:
                return False
    return True


def _missing(arguments: Mapping[str, Any], region: str) -> list[Any]:
    return [leaf for leaf in _with_keys(arguments) if not any(form in region for form in _literals(leaf))]


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
    """Return the ways in which a text or number may appear in a call that is written as Python or in Gemma's way."""
    if isinstance(leaf, str):
        quoted = leaf.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
        return [leaf, quoted, repr(leaf)[1:-1], *_as_json(leaf)]
    return [str(leaf), json.dumps(leaf, default=str), *([json.dumps(float(leaf))] if isinstance(leaf, int) else [])]


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
    """Yield contents of a prompt that are not the row's: BOS twice or never, nulls, Python, words of other rows."""
    own = json.dumps([each.value for each in said], ensure_ascii=False, default=str)
    other = _OTHER_FORM.search(shown)
    if other and not _OTHER_FORM.search(own.replace('\\"', '"')):
        yield f"another form: {shown[max(0, other.start() - 20) : other.end() + 60]!r}"
    nothing = _NOTHING.findall(shown)
    if len(nothing) > len(_NOTHING.findall(own)) + len(_NOTHING.findall(plain)):
        at = [match.start() for match in _NOTHING.finditer(shown)][-1]
        yield f"a null that was not said: {shown[max(0, at - 60) : at + 20]!r}"
    known = {*row_marks, *MARK.findall(json.dumps(schemas))}
    if foreign := sorted(set(MARK.findall(shown)) - known):
        at = shown.find(foreign[0])
        yield f"words of another row: {shown[max(0, at - 60) : at + 40]!r}"
    begins = re.match(
        r"(?:<bos>|<s>|<BOS_TOKEN>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|<\|startoftext\|>)+", plain
    )
    if begins and not shown.startswith(begins[0]):
        yield f"BOS: the prompt begins with {shown[:40]!r}"
    if begins and shown.startswith(begins[0] * 2):
        yield f"BOS twice: {shown[:60]!r}"
