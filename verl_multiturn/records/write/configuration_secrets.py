"""`without_secrets`: which values of a configuration are secrets. Files of runs and cards of models leave them out.

Invariant: no value whose key names a secret, and no user and password of a URL, is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"((^|_)(api_?keys?|tokens?|jwts?|pwd|pass|passphrases?|secrets?|credentials?|creds|private_?keys?|access_?keys?"
    r"|secret_?(access_)?keys?|(proxy_)?authorization|o?auth2?|bearer|pat|cookies?|session(_(id|key))?|t?otp|pin|salt"
    r"|sig|signature|sas(_ur[il])?|dsn|conn(ection)?_?str(ing)?|webhooks?(_ur[il]s?)?)|passw(or)?ds?)$",
    re.IGNORECASE,
)
"""The end of a key: `token_level`, `tokenizer`, `pin_memory` and `signature_columns` are not secrets."""
_OF_TEXT = re.compile(
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|audio|vision|stop|special|added|think(ing)?)_tokens?$", re.I
)
"""Keys of a tokenizer's own tokens."""
_KEY, _COLUMN = re.compile(r"_key$", re.IGNORECASE), re.compile(r"[A-Za-z]+(_[A-Za-z]+)*")
"""`openai_key` is a secret; `prompt_key` of verl's `data` names a column."""
_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_IN_URL = re.compile(
    r"(?P<scheme>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,40}://)(?:[^/?#\s]{1,2000}|[^/?#\s:@]*:(?!\d*(?:[/?#]|$))[^\s\"'<>]{0,2000})@",
    re.IGNORECASE,
)
"""User and password of a URL: up to the last `@`, since a password may have one, and a `/`, too. A port is neither."""
_IN_QUERY = re.compile(r"(?P<before>[?&#](?P<key>[\w.-]{1,80})=)(?P<value>[^&#\s\"']+)", re.IGNORECASE)
_QUERY_KEY = re.compile(r"key|code", re.IGNORECASE)
"""Names that are harmless in a configuration, and secrets in a URL."""
_BEARER = re.compile(r"(?P<word>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE)
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s&;,'")}\]]+)"""
_GIVEN = (
    re.compile(rf"(?<![\w-])(?P<before>--?(?P<key>[a-z][\w.-]{{0,80}})\s+(?!-)){_VALUE}", re.IGNORECASE),
    re.compile(rf"(?<![\w.?&])(?P<before>(?P<key>[a-z_][\w.-]{{0,80}})=(?!=)){_VALUE}", re.IGNORECASE),
    re.compile(
        r"(?<![\w-])(?P<before>(?P<key>(?:proxy-)?authorization|x-[\w-]{1,80}|[\w-]{0,80}api[-_]?key)[\"']?:\s*"
        rf"(?:(?:bearer|basic|token)\s+)?){_VALUE}",
        re.IGNORECASE,
    ),
    re.compile(rf"(?P<before>(?P<quote>[\"'])(?P<key>[\w.-]{{1,80}})(?P=quote)\s*:\s*(?=[\"'])){_VALUE}"),
    re.compile(r"(?P<before>\b(?:set-)?(?P<key>cookie):\s*)(?P<value>[^\"'\n]+)", re.IGNORECASE),
)
"""An option, an assignment, a header, an entry of JSON, and the cookies of a request in a text."""
_USER = re.compile(
    r"(?P<before>(?<![\w-])(?:-u|--user)[\s=]+(?P<quote>[\"'])?[^\s:\"'=]{1,80}:)(?(quote)[^\"'\n]+|[^\s\"']+)"
)
"""The user and the password in the arguments of `curl`."""
_KNOWN = re.compile(
    r"\b(?:hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{12,999}|sk-(?=[\w-]*[A-Z0-9])[\w-]{12,999}|gh[opusr]_\w{16,999}|github_pat_\w{16,999}"
    r"|glpat-[\w-]{16,999}|(?:AKIA|ASIA)[A-Z0-9]{12,999}|xox[a-z]-[\w-]{8,999}|xapp-[\w-]{8,999}|AIza[\w-]{30,999}|ya29\.[\w-]{16,999}"
    r"|nvapi-[\w-]{16,999}|gsk_\w{16,999}|npm_\w{30,999}|pypi-[\w-]{30,999}|eyJ[\w-]{8,999}\.[\w-]{4,999}(?:\.[\w-]{0,999})?)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)",
    re.DOTALL,
)
"""Secrets that services give out, by their beginnings: they are secrets whatever their key."""
_HOOK = re.compile(
    r"(?P<place>https?://(?:hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]*webhook\.office\.com"
    r"|outlook\.office(?:365)?\.com/webhook|api\.telegram\.org/bot))[^\s\"']+",
    re.IGNORECASE,
)
"""Addresses where every client that knows them may write."""
_OPTION = re.compile(r"--?(?P<key>[a-z][\w.-]*)", re.IGNORECASE)
_NO_SECRET = re.compile(r"[\d.,]+|none|null|true|false", re.IGNORECASE)


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a configuration in which secrets are `***`.

    A value is a secret, and so is all below it, where its key names one (`api_key`, `hf_token`, `PGPASSWORD`, `jwt`,
    `webhook_url`); in a text, the user and password of a URL, the parameters of a URL that name a secret, the text
    after `Bearer`, the values of options, assignments, headers and entries that name one, a private key, and texts that
    begin like the tokens of well-known services. Numbers, truth values and null are none, whatever their key:
    `max_tokens` is a limit. A key that ends in `_key` names a secret, except below `data` where it names a column. Of
    an entry of a list, the key may be beside it: `{name: …, value: …}`, or a pair.

    Args:
        value: Mappings, lists and plain values.
        key: The key that leads to it, after a dot each.
    """
    return _without(value, key, is_secret=False)


def _without(value: Any, path: str, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        below = is_secret or _names_secret(path, None)
        named = value.get("name", value.get("key"))
        is_named = isinstance(named, str) and "value" in value and _names_secret(named, None)
        return {
            name: _without(item, f"{path}.{name}" if path else str(name), below or (is_named and name == "value"))
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        if all(_is_pair(item) for item in value):  # headers, as many libraries take them
            return [[name, _without(item, path, is_secret or _names_secret(name, item))] for name, item in value]
        options = [None, *(isinstance(item, str) and _OPTION.fullmatch(item) for item in value)]
        return [
            _without(item, path, is_secret or bool(option and _is_for_option(option["key"], item)))
            for option, item in zip(options, value, strict=False)
        ]
    if not isinstance(value, str) or not value:
        return value
    if is_secret or _names_secret(path, value):
        return HIDDEN
    hidden = _KNOWN.sub(HIDDEN, value)
    hidden = _HOOK.sub(rf"\g<place>/{HIDDEN}", hidden)
    hidden = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", hidden)
    hidden = _IN_QUERY.sub(_hide_parameter, hidden)
    hidden = _USER.sub(rf"\g<before>{HIDDEN}", hidden)
    hidden = _BEARER.sub(rf"\g<word>{HIDDEN}", hidden)
    for given in _GIVEN:
        hidden = given.sub(_hide_given, hidden)
    return hidden


def _names_secret(path: str, value: object) -> bool:
    """Return whether the last key of a path names a secret; the value decides whether it names a column."""
    *above, last = path.split(".")
    key = _WORD_EDGE.sub("_", last).replace("-", "_")
    if _SECRET.search(key):
        return _OF_TEXT.search(key) is None
    is_column = above[:1] == ["data"] and isinstance(value, str) and _COLUMN.fullmatch(value) is not None
    return _KEY.search(key) is not None and not is_column


def _is_for_option(key: str, item: object) -> bool:
    """Return whether the text after an option in a list is its secret."""
    is_user = key in ("u", "user") and isinstance(item, str) and ":" in item
    return is_user or (_names_secret(key, item) and _is_value(item))


def _is_pair(item: object) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and all(isinstance(each, str) for each in item)


def _hide_parameter(found: re.Match[str]) -> str:
    is_secret = _QUERY_KEY.fullmatch(found["key"]) or _names_secret(found["key"], None)
    return f"{found['before']}{HIDDEN}" if is_secret else found[0]


def _hide_given(found: re.Match[str]) -> str:
    value = found["value"].strip("\"'")
    if not _names_secret(found["key"], value) or not _is_value(value):
        return found[0]
    return f"{found['before']}{HIDDEN}"


def _is_value(given: object) -> bool:
    """Return whether the text after an option is its value, and may be a secret."""
    return isinstance(given, str) and not given.startswith("-") and _NO_SECRET.fullmatch(given) is None
