"""Find who wrote an unreachable address or an unreadable text: the model, or the service and its author.

An error carries its subject: the text that is not JSON, the bytes that are not UTF-8, the address that refuses. If the
subject is in the texts of the model, such as the arguments of its calls, the model wrote it, and else the service.

    JSON that a tool reads from `arguments["rows"]`     JSONDecodeError.doc is a part of the arguments     the model's
    an answer of http://search:8000/, not JSON          JSONDecodeError.doc is the text of the answer      the service's
    a tool that opens `arguments["url"]`                the address that was opened is in the arguments    the model's

Some errors of clients do not carry it (urllib's, those of sockets, and after a redirect all). Then the frames of the
traceback have it: the arguments that the author's code handed to the client. An error of another process has no frames.

The output of a program or a file is the model's, too, as far as a frame holds the program, the sandbox or the file.

Invariant: no method of an author's object is called, and an object that cannot be examined is not evidence.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_HANDED = {
    ("aiohttp.client", "_request"): "str_or_url",
    ("asyncio.base_events", "create_connection"): "host",
    ("http.client", "_send_request"): "self.host",
    ("http.client", "connect"): "self.host",
    ("http.client", "getresponse"): "self.host",
    ("httpx._client", "request"): "url",
    ("httpx._client", "send"): "request.url",
    ("httpx._client", "stream"): "url",
    ("httpx2._client", "request"): "url",
    ("httpx2._client", "send"): "request.url",
    ("httpx2._client", "stream"): "url",
    ("requests.sessions", "request"): "url",
    ("requests.sessions", "send"): "request.url",
    ("socket", "create_connection"): "address",
    ("urllib.request", "open"): "fullurl",
    ("urllib.request", "urlopen"): "url",
    ("urllib3.connectionpool", "urlopen"): "self.host",
    ("urllib3.poolmanager", "urlopen"): "url",
    ("websockets.asyncio.client", "create_connection"): "self.uri",
}
"""The local variable of a client's function that has the address, by module and function."""
_ADDRESSES = (
    *("request.url", "url", "request_info.real_url", "host", "conn.host", "pool.host", "filename"),
    *("response.url", "response.history", "history"),
)
"""Attributes of errors that have an address, or answers that led to another one."""
_READ = {
    ("gzip", "decompress"): "data",
    ("json", "loads"): "s",
    ("xml.etree.ElementTree", "XML"): "text",
    ("xml.etree.ElementTree", "fromstringlist"): "sequence",
    ("xml.dom.minidom", "parseString"): "string",
}
"""The local variable of a reader that has the unreadable text."""
_SUBJECTS = ("doc", "object", "problem_mark.buffer", "text")
"""Attributes of errors that have the unreadable text."""
_ANSWERS = ("aiohttp.client_reqrep", "httpx._models", "httpx2._models", "requests.models", "urllib3.response")
"""Modules of clients whose frames show that an answer was read."""
_OF_ANSWERS = (*_ANSWERS, "http.client", "httpx", "httpx2")
"""Modules of the classes of answers and connections."""
_ROOMS = ("sandbox", "workspaces", "verdicts")
_PROGRAMS = ("subprocess", "asyncio.subprocess", "pathlib", *(f"verl_multiturn.{room}" for room in _ROOMS))
"""Modules of the objects through which a tool reads the output of the model's programs and files."""
_FILES = ("TextIOWrapper", "BufferedReader")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_NO_BREAKS = dict.fromkeys(map(ord, "\t\r\n"))
"""Characters that `urlsplit` leaves out of an address."""
_LEAST = 8
"""Fewest letters and digits of a part of a text that is known again in it."""


class WrittenTexts(NamedTuple):
    """Texts and values of JSON that others than the service and the author wrote, such as the arguments of calls."""

    model: Sequence[Any] = ()
    """Texts and values of the model."""
    row: Sequence[Any] = ()
    """Texts and values of the data row. An address there is the author's."""


NOTHING = WrittenTexts()


def errors_within(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes, the errors that it wraps, and the members of groups, each once."""
    found, seen = [error], set[int]()
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        context = None if each.__suppress_context__ else each.__context__
        wrapped = (attribute(each, name) for name in ("reason", "os_error", "orig"))
        members = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        within = (*members, *wrapped, *each.args, each.__cause__, context)
        found += [one for one in within if isinstance(one, BaseException)]


def names_address(error: BaseException, written: Sequence[Any]) -> bool:
    """Return whether the address of a client's error, or one that led to it, is among the texts.

    Where the address is unknown: whether any was written.

    Args:
        error: The error.
        written: The texts, also those of JSON, and values of JSON.
    """
    if not written:
        return False
    values = list(_leaves(written))
    addresses = {address for each in errors_within(error) for address in _addresses(each)}
    if not addresses:
        return any(isinstance(value, str) and _URL.match(value.strip()) for value in values)
    return any(_is_address_in(address, values) for address in addresses)


def names_subject(error: BaseException, written: Sequence[Any]) -> bool:
    """Return whether the unreadable text is among those written.

    Args:
        error: The error.
        written: As in `names_address`.
    """
    frames = list(_frames(error))
    if any(module in _ANSWERS for module, _, _ in frames):
        return False
    if any(map(_is_program, (value for _, _, values in frames for value in values.values()))):
        return True
    values = list(_leaves(written))
    if any(map(_is_clients, (value for _, _, locals_ in frames for value in locals_.values()))):
        values = [value for value in values if value != ""]  # nothing is read in an empty answer, too
    if (listed := _inputs(error)) is not None:
        return all(_is_value_in(leaf, values) for leaf in _leaves(listed, is_flat=True))
    return any(_is_text_in(form, values) for subject in _subjects(error) for form in _forms(subject))


def came_from(error: BaseException, modules: Sequence[str]) -> bool:
    """Return whether an error was raised in one of some modules.

    Args:
        error: The error.
        modules: Their dotted names.
    """
    return [module for module, _, _ in _frames(error)][-1:] in [[module] for module in modules]


def is_of_socket(error: BaseException) -> bool:
    """Return whether a stream of asyncio that ended was that of a socket, and not that of a program."""
    streams = [values.get("self") for module, _, values in _frames(error) if module == "asyncio.streams"]
    transports = [getattr(stream, "_transport", None) for stream in streams]
    return any(each is not None and each.get_extra_info("peername") is not None for each in transports)


def names_word(error: BaseException, written: Sequence[Any]) -> bool:
    """Return whether somebody wrote the name that an error of a database is about, as in `no such table: x`."""
    found = re.search(r"near \"(.+)\"|: ([\w.]+)$", str(error))
    name = (found[1] or found[2]).lower() if found else ""
    return bool(name) and any(isinstance(text, str) and name in text.lower() for text in _leaves(written))


def _addresses(error: BaseException) -> Iterator[str]:
    found = [(_at(error, path), path) for path in _ADDRESSES]
    for module, name, values in _frames(error):
        if path := _HANDED.get((module, name)):
            found.append((_at(values, path), path))
        for value in filter(_is_clients, values.values()):
            found += [(_at(value, path), path) for path in ("url", "history", "host", "_pool.host")]
    for each, path in found:
        is_host = path.endswith(("host", "address"))
        for one in each if isinstance(each, list | tuple) else (each,):  # a pair of host and port; answers on the way
            text = _text_of_address(one).strip().lower()
            if text and (is_host or _URL.match(text)):  # a path below a configured address is not evidence
                yield text


def _text_of_address(found: Any) -> str:
    if isinstance(found, bytes):
        return found.decode("latin-1")
    if isinstance(found, str):
        return found
    for name in ("full_url", "url"):  # a request, or an answer, has it
        if isinstance(within := getattr(found, name, None), str) or type(within).__name__ == "URL":
            return str(within)
    return str(found) if type(found).__name__ == "URL" else ""


def _is_address_in(address: str, values: Sequence[Any]) -> bool:
    """Return whether a text among the values names an address, or its host as an address."""
    host = _host(address) if _URL.match(address) else address.strip("[]")
    texts = [value.lower() for value in values if isinstance(value, str)]
    if _URL.match(address) and any(address.rstrip("/") in text for text in texts):
        return True
    if not host:
        return False
    texts = [text for text in texts if host in text.translate(_NO_BREAKS)]
    if any(host in (text.strip(), _host(text.strip())) for text in texts):
        return True
    before = r"(?<![\w.-])" if "." in host or ":" in host else "://"  # a plain word may be any word
    pattern = re.compile(rf"{before}(?:[^\s/@]*@)?\[?{re.escape(host)}(?![\w-]|\.\w)")
    return any(pattern.search(text) for text in texts)


def _host(address: str) -> str:
    """Return the host of an address with or without a scheme; "" where it is none."""
    text = address if _URL.match(address) else f"//{address}"
    try:
        host = urlsplit(text).hostname or ""
    except ValueError:
        return ""
    return "" if re.search(r"\s", host) else host


def _subjects(error: BaseException) -> Iterator[str | bytes]:
    found = [_at(error, path) for path in _SUBJECTS]
    found += [_at(values, path) for module, name, values in _frames(error) if (path := _READ.get((module, name)))]
    for each in found:
        yield from (one for one in (each if isinstance(each, list | tuple) else [each]) if isinstance(one, str | bytes))


def _inputs(error: BaseException) -> list[Any] | None:
    """Return the values that pydantic could not take; None for another error, and for a text that is not JSON."""
    if not any(each.__name__ == "ValidationError" and "pydantic" in each.__module__ for each in type(error).__mro__):
        return None
    return [each.get("input") for each in error.errors(include_url=False)]  # type: ignore[attr-defined]


def _forms(subject: str | bytes) -> Iterator[str]:
    """Yield the texts in which bytes may have been written."""
    if isinstance(subject, str):
        yield subject
        return
    yield subject.decode("utf-8", "ignore")
    yield subject.decode("latin-1")
    if subject:
        yield base64.b64encode(subject).decode().rstrip("=")
        yield base64.urlsafe_b64encode(subject).decode().rstrip("=")
        yield subject.hex()


def _is_text_in(text: str, values: Sequence[Any]) -> bool:
    """Return whether a text is in the values; only its letters and digits count."""
    texts = [value for value in values if isinstance(value, str)]
    bare = text.strip()
    if any(bare == value.strip() or (len(bare) > 1 and bare in value) for value in texts):
        return True
    plain = _plain(text)
    return bool(plain) and any(
        plain == other or (len(plain) >= _LEAST and plain in other) for other in map(_plain, texts)
    )


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", "", text).lower()


def _is_value_in(value: Any, values: Sequence[Any]) -> bool:
    if isinstance(value, str | bytes):
        return any(_is_text_in(form, values) for form in _forms(value))
    if value == {} or not isinstance(value, bool | int | float | None):
        return value != {} or {} in values
    return any(str(value).lower() == str(other).strip().lower() for other in values)


def _leaves(value: Any, is_flat: bool = False) -> Iterator[Any]:
    """Yield the values within a value, with the texts that hold JSON and the values in them.

    Args:
        value: The value.
        is_flat: Whether texts are only texts.
    """
    within = [value]
    while within:
        each = within.pop()
        if isinstance(each, Mapping):
            within += [*each, *each.values()] if each else []
            if not each:
                yield {}
        elif isinstance(each, list | tuple):
            within += each
        else:
            yield each
            if isinstance(each, str) and not is_flat and each.lstrip()[:1] in ("{", "["):
                with contextlib.suppress(ValueError, RecursionError):
                    within.append(json.loads(each))


def _frames(error: BaseException) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    """Yield the module, the function and the local variables of each frame of an error's traceback."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name, dict(frame.f_locals)
        trace = trace.tb_next


def _is_clients(value: Any) -> bool:
    """Return whether a value is an answer or a connection of a client."""
    kind = type(value)
    return kind.__module__ in _OF_ANSWERS and kind.__name__.endswith(("Response", "Connection"))


def _is_program(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith(_PROGRAMS) or (kind.__module__ == "_io" and kind.__name__ in _FILES)


def attribute(holder: Any, name: str) -> Any:
    """Return an attribute, or the value of a key; None where there is none, or where it raises.

    Args:
        holder: Its owner.
        name: Its name. A property of a client, such as httpx's `request`, may raise.
    """
    try:
        return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    except Exception:  # it is an object of somebody else's library
        return None


def _at(holder: Any, path: str) -> Any:
    """Return the value at a path of attributes, whose first one may be a key; None without one."""
    for name in path.split("."):
        holder = attribute(holder, name)
    return holder
