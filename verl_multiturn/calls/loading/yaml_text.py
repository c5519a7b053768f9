"""Our YAML files, read by the core schema of YAML 1.2.

PyYAML reads YAML 1.1, where `no`, `off` and `on` are booleans, `12:30` is 750, `014` is 12 and `2024-05-01` is a date.
Here they are read as they look: texts, and the number 14. A key that occurs twice, and a value that holds itself, are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_CORE = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  # the name and form are PyYAML's

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge"]
        known: set[tuple[str, str]] = set()
        for key in keys:
            if (key.tag, key.value) in known:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice; remove one", key.start_mark
                )
            known.add((key.tag, key.value))
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        _refuse_circles(node, set(), set())
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        text = str(self.construct_scalar(node)).lower()
        if node.tag == f"{_TAG}float":
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


for _name, _pattern, _first in _CORE:
    _CoreLoader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"(?:{_pattern})\Z"), list(_first))
for _name in ("int", "float"):
    _CoreLoader.add_constructor(f"{_TAG}{_name}", _CoreLoader.construct_number)


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text.

    Raises:
        yaml.YAMLError: It is not YAML, a key occurs twice in a mapping, or a value holds itself.
        RecursionError: It is nested too deeply.
    """
    return yaml.load(text, _CoreLoader)


def words_of_two_meanings(text: str) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Yield each unquoted value that YAML 1.1 reads as something other than a text, and YAML 1.2 reads otherwise.

    Yields:
        Keys and indices that lead to the value, the value as it is written, and its meaning in YAML 1.1.
    """
    for path, node in _plain_scalars(yaml.compose(text, _CoreLoader), ()):
        word = node.value
        try:
            before, now = yaml.safe_load(word), read_yaml(word)
        except (yaml.YAMLError, ValueError):
            continue
        if isinstance(before, str) or (type(before), repr(before)) == (type(now), repr(now)):
            continue
        plain: Any = yaml.compose(word, _CoreLoader)
        if plain.tag == node.tag:  # otherwise its author has given it a tag
            yield path, word, before


def _plain_scalars(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], yaml.ScalarNode]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _plain_scalars(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _plain_scalars(value, (*path, index))
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        yield path, node


def _refuse_circles(node: Any, within: set[int], seen: set[int]) -> None:
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    if id(node) in within:
        raise yaml.constructor.ConstructorError(
            None, None, "a value holds itself; write it out without an alias", node.start_mark
        )
    within.add(id(node))
    for each in node.value:
        for inner in each if isinstance(each, tuple) else (each,):
            _refuse_circles(inner, within, seen)
    within.remove(id(node))
    seen.add(id(node))
