"""`read_settings`: the configuration in a run's folder, as data.

Invariants:
- a reference to another value of the same configuration (`${data.seed}`, `${oc.select:data.seed,1}`) is replaced by it;
- every other resolver stays the text that it is: nothing is read from the environment, and nothing is called;
- the result is not much larger than the file, despite its references and anchors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.calls.loading.yaml_text import read_yaml
from verl_multiturn.config import with_derived
from verl_multiturn.paths import read_regular

HYDRA = Path("hydra") / ".hydra" / "config.yaml"
"""Place of a run's configuration in its folder."""
_MOST_BYTES, _DEEPEST = 256 << 10, 100
_MOST_RESOLVED = 2 << 20
"""Characters and values of a whole configuration with its references replaced."""
_PATH = r"\.*[\w@/-]+(?:\.[\w@/-]+|\[[\w-]+\])*"
_REFERENCE = re.compile(rf"\$\{{\s*(?P<path>{_PATH})\s*\}}")
_SELECT = re.compile(rf"\$\{{\s*oc\.select\s*:\s*(?P<path>{_PATH})\s*(?:,(?P<default>.*))?\}}", re.DOTALL)
_BRACKET, _ALIAS = re.compile(r"[\[\]{}]"), re.compile(r"(?:^|[\s\[,{:?-])\*\S")
_PLAIN = re.compile(r"[^&*!]{0,1000}")
"""A default that is written out."""
_MISSING: Any = object()


def read_settings(run: Path) -> dict[str, Any]:
    """Return the composed configuration of a run as plain dictionaries and lists; {}: it is not there, or damaged.

    Args:
        run: Folder of the run.
    """
    path = run / HYDRA
    try:
        text = read_regular(path, run, _MOST_BYTES).decode("utf-8")
        if _is_deep(text):
            return {}
        if _ALIAS.search(text) and any(isinstance(each, yaml.AliasEvent) for each in yaml.parse(text, yaml.SafeLoader)):
            return {}  # Hydra writes none, and a page of them is gigabytes
        plain = read_yaml(text)
        return dict(with_derived(resolve_references(plain))) if isinstance(plain, dict) else {}
    except (OSError, RuntimeError, ValueError, yaml.YAMLError):
        return {}


def _is_deep(text: str) -> bool:
    """Return whether brackets are open within each other so often that reading them would take minutes."""
    depth = 0
    for found in _BRACKET.finditer(text):
        depth = max(depth + (1 if found[0] in "[{" else -1), 0)
        if depth > _DEEPEST:
            return True
    return False


def resolve_references(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a configuration in which references to its own values are replaced by these; other resolvers stay texts.

    Args:
        values: The configuration, unresolved.
    """
    try:
        found = _Resolved(values).of(values, ())
    except (_TooLargeError, RecursionError):
        found = values
    return {str(key): value for key, value in found.items()}


def as_texts(value: Any) -> Any:
    """Return a configuration that OmegaConf reads as it is: no `${` in it is a reference any more.

    Args:
        value: Mappings, lists and plain values.
    """
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", value)
    if isinstance(value, Mapping):
        return {key: as_texts(item) for key, item in value.items()}
    return [as_texts(item) for item in value] if isinstance(value, list) else value


class _TooLargeError(Exception):
    """A configuration would become too large."""


class _Resolved:
    """The values of a configuration, resolved where they are wanted.

    Args:
        values: The configuration.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values = values
        self._left = _MOST_RESOLVED
        self._open: list[tuple[str, ...]] = []
        """Paths of the references that are being replaced."""

    def of(self, value: Any, above: tuple[str, ...]) -> Any:
        """Return a value, resolved.

        Args:
            value: The value.
            above: Path of the mapping or list that holds it.
        """
        self._spend(1)
        if isinstance(value, Mapping):
            return {key: self.of(item, self._below(item, above, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.of(item, self._below(item, above, number)) for number, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        found = self._text(value, above) if "${" in value else value
        if isinstance(found, str):
            self._spend(len(found))
        return found

    def _below(self, item: Any, above: tuple[str, ...], key: Any) -> tuple[str, ...]:
        return (*above, str(key)) if isinstance(item, Mapping | list) else above

    def _text(self, text: str, above: tuple[str, ...]) -> Any:
        if (whole := _REFERENCE.fullmatch(text)) is not None:
            found = self._at(whole["path"], above)
            return text if found is _MISSING else found
        if (select := _SELECT.fullmatch(text)) is not None:
            return self._selected(text, select, above)
        found = list(_REFERENCE.finditer(text))
        parts = [self._at(each["path"], above) for each in found]
        if text.count("${") != len(parts) or any(
            part is _MISSING or isinstance(part, Mapping | list) for part in parts
        ):
            return text
        pieces = list(map(str, parts))
        self._spend(sum(map(len, pieces)))
        left = iter(pieces)
        return _REFERENCE.sub(lambda _: next(left), text)

    def _selected(self, text: str, select: re.Match[str], above: tuple[str, ...]) -> Any:
        found, default = self._at(select["path"], above), select["default"]
        if found not in (_MISSING, None) or default is None:
            return None if found is _MISSING else found
        if "${" not in default:
            return read_yaml(default) if _PLAIN.fullmatch(default) else text
        found = self._text(default.strip(), above)
        return text if isinstance(found, str) and "${" in found else found

    def _at(self, reference: str, above: tuple[str, ...]) -> Any:
        """Return the value at a path; one that begins with a dot is counted from the mapping that holds it."""
        name = re.sub(r"\[([\w-]+)\]", r".\1", reference)
        dots = len(name) - len(name.lstrip("."))
        begin = above[: len(above) - dots + 1] if dots else ()
        path = (*begin, *name.lstrip(".").split("."))
        value: Any = self._values
        for key in path:
            if isinstance(value, Mapping):
                value = next((item for each, item in value.items() if str(each) == key), _MISSING)
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return _MISSING
        if path in self._open:
            return _MISSING
        self._open.append(path)
        try:
            return self.of(value, path if isinstance(value, Mapping | list) else path[:-1])
        finally:
            self._open.pop()

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _TooLargeError
