"""Find the parameters of a tool through which a model may choose an address that the tool opens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = {
    *("address", "addresses", "domain", "domains", "endpoint", "endpoints", "host", "hostname", "hosts", "href", "ip"),
    *(
        "link",
        "links",
        "proxy",
        "server",
        "site",
        "sites",
        "uri",
        "uris",
        "url",
        "urls",
        "webhook",
        "webpage",
        "website",
    ),
}
_FORMATS = ("hostname", "idn-hostname", "ipv4", "ipv6", "iri", "iri-reference", "uri", "uri-reference", "url")
_WITHIN = ("allOf", "anyOf", "items", "oneOf", "prefixItems")


def address_parameters(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that look like addresses, also those within others, in order.

    Args:
        parameters: The JSON Schema of a tool's parameters.
    """
    return list(dict.fromkeys(_found(parameters, "")))


def _found(schema: Any, name: str) -> Iterator[str]:
    if isinstance(schema, list):
        for each in schema:
            yield from _found(each, name)
    if not isinstance(schema, Mapping):
        return
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    can_be_text = "string" in str(schema.get("type", "string" if "properties" not in schema else ""))
    if name and can_be_text and (schema.get("format") in _FORMATS or any(word.lower() in _WORDS for word in words)):
        yield name
    for key in _WITHIN:
        yield from _found(schema.get(key), name)
    for inner, of in (*_items(schema.get("properties")), *_items(schema.get("$defs"))):
        yield from _found(of, inner)


def _items(found: Any) -> list[tuple[str, Any]]:
    return list(found.items()) if isinstance(found, Mapping) else []
