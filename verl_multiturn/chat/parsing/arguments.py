"""Values of arguments that the model wrote as plain text, read by the schema of the tool.

A text that is JSON can be read in two ways: as the text, and as the value. The tool's own validator decides:
- the value, where the schema takes it. So `42` is a number for a schema without a type, and `null` is null for a schema
  that takes texts and null. A value that comes second could not be written at all, since a schema that takes texts most
  often takes each text;
- the text as it is, where the schema takes no such value. So `42` is a text for `{"type": "string"}`.

Where a schema takes the value, a JSON string is how the text itself is written: `"42"` is the text 42. A JSON string
that needs no such quotes is a text as it is, with its quotes: `"a"` is three characters.

Invariants:
- each value that a schema takes can be written, and each text that it takes as a text stays as it is;
- several arguments are read together, since a schema may take one value because of another;
- the number of validations grows with the arguments and with the alternatives of the schema, and not with their
  combinations.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema_rs import ValidationError

from verl_multiturn.chat.parsing.call_json import read_whole_json
from verl_multiturn.json_schema.validators import Validator, validator_of

# Chat templates write an argument as Jinja prints it, which is Python's spelling.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_MOST_SINGLE = 16
"""How many arguments of a call are tried one by one."""


@dataclass(frozen=True)
class _TextValue:
    """Meaning of a text that is not read as it is."""

    core: Any
    """The value in the text, without the quotes of JSON strings around it; never a text."""
    read: Any
    """The core; or, where it is in quotes, the text in the outermost of them."""

    @property
    def both(self) -> tuple[Any, ...]:
        """Return the texts that the schema must take: the core, too, since quotes mean something only beside it."""
        return (self.core,) if self.core is self.read else (self.core, self.read)


def read_value(text: str) -> Any:
    """Return the value of a text that is JSON, or Python's `True`, `False` or `None`; another text as it is."""
    try:
        return _json(text)
    except (ValueError, RecursionError):
        return text


def read_arguments(texts: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a call's arguments.

    Where no reading fits the schema, the later check against it informs the model.

    Args:
        texts: The model's text between the tags, by argument.
        schema: JSON Schema of the arguments.
    """
    values = {key: value for key, text in texts.items() if (value := _value(text)) is not None}
    if not values:
        return dict(texts)
    reader = _ArgumentReader(texts, values, validator_of(json.dumps(schema)))
    try:
        return reader.arguments(reader.kept())
    except (ValueError, RecursionError):  # the validator allows less nesting than the JSON parser
        return reader.arguments(())


def _json(text: str) -> Any:
    word = text.strip()
    return _PYTHON_WORDS[word] if word in _PYTHON_WORDS else read_whole_json(word)


def _value(text: str) -> _TextValue | None:
    """Return a text's other meaning; None if it can only be read as it is."""
    try:
        core = read = _json(text)
        while isinstance(core, str):
            core = _json(core)
    except (ValueError, RecursionError):
        return None
    return _TextValue(core, read)


class _ArgumentReader:
    """The reading of one call's arguments.

    Args:
        texts: The arguments as texts.
        values: The values of the texts that can be read as something else.
        validator: The validator of all arguments; None: each of them may be anything.
    """

    def __init__(self, texts: Mapping[str, str], values: Mapping[str, _TextValue], validator: Validator | None) -> None:
        self._texts = texts
        self._values = values
        self._validator = validator

    def arguments(self, kept: Collection[str]) -> dict[str, Any]:
        """Return the arguments, those in `kept` as they are."""
        return {
            key: text if key in kept or key not in self._values else self._values[key].read
            for key, text in self._texts.items()
        }

    def kept(self) -> set[str]:
        """Return the arguments that are read as they are."""
        if self._validator is None:
            return set()
        kept = self._mended(self._refused())
        if self._validator.is_valid(self.arguments(kept)):
            for key in sorted(kept)[:_MOST_SINGLE]:  # one may have been refused because of another's first reading
                other = self.arguments(kept - {key})
                if all(self._validator.is_valid({**other, key: each}) for each in self._values[key].both):
                    kept = kept - {key}
            return kept
        # Nothing fits. The reading of the better type makes the better message.
        cores = self._errors({**self._texts, **{key: value.core for key, value in self._values.items()}})
        wrong = {error.instance_path[0] for error in cores if error.instance_path and _is_of_another_type(error)}
        return {key for key in kept if key in wrong}

    def _errors(self, arguments: Mapping[str, Any]) -> list[ValidationError]:
        assert self._validator is not None
        return list(self._validator.iter_errors(arguments))

    def _refused(self) -> set[str]:
        """Return the arguments whose value the schema refuses, whatever alternative of it is taken."""
        kept: set[str] = set()
        while True:
            cores = {key: value.core for key, value in self._values.items() if key not in kept}
            refused = _refused_in_all(self._errors({**self._texts, **cores}), cores.keys())
            if not refused:
                return kept
            kept |= refused

    def _mended(self, kept: set[str]) -> set[str]:
        """Return readings with as few errors as can be had by reading the arguments in error in the other way."""
        errors = self._errors(self.arguments(kept))
        # The quotes of a text whose core is refused are its own, so they stay.
        free = {key for key, value in self._values.items() if key not in kept or value.core is value.read}
        while errors:
            for changed in self._changes(errors, free, kept):
                left = self._errors(self.arguments(kept ^ changed))
                if len(left) < len(errors):
                    kept, errors = kept ^ changed, left
                    break
            else:
                break
        return kept

    def _changes(self, errors: Iterable[ValidationError], free: set[str], kept: set[str]) -> Iterator[set[str]]:
        """Yield sets of free arguments that are to be read in the other way, the likeliest first."""
        yield from _named(errors, free)
        yield free - kept
        for key in sorted(free)[:_MOST_SINGLE]:
            yield {key}


def _alternatives(error: ValidationError) -> list[list[ValidationError]]:
    """Return the errors of each alternative, for an error that all of them failed; empty for any other."""
    return list(getattr(error.kind, "context", None) or [])


def _refused_in_all(errors: Iterable[ValidationError], keys: Collection[str]) -> set[str]:
    """Return the arguments that are in error, and in an `anyOf` or `oneOf` in each alternative that they could fit."""
    refused: set[str] = set()
    for error in errors:
        if error.instance_path:
            refused |= {str(error.instance_path[0])} & set(keys)
        elif fitting := [branch for branch in _alternatives(error) if _may_fit(branch, keys)]:
            refused |= set.intersection(*(_refused_in_all(branch, keys) for branch in fitting))
    return refused


def _may_fit(errors: Iterable[ValidationError], keys: Collection[str]) -> bool:
    return all(
        error.instance_path[0] in keys
        if error.instance_path
        else any(_may_fit(branch, keys) for branch in _alternatives(error))
        for error in errors
    )


def _named(errors: Iterable[ValidationError], keys: Collection[str]) -> Iterator[set[str]]:
    """Yield the arguments that are in error, then those of each alternative."""
    errors = list(errors)
    direct = {str(error.instance_path[0]) for error in errors if error.instance_path} & set(keys)
    if direct:
        yield direct
    for error in errors:
        for branch in _alternatives(error) if not error.instance_path else ():
            for each in _named(branch, keys):
                yield direct | each


def _is_of_another_type(error: ValidationError) -> bool:
    """Return whether an error reports that an argument is of another type than the schema wants."""
    if len(error.instance_path) > 1:
        return False
    kind: Any = error.kind
    if kind.name in ("enum", "const"):
        wanted = kind.options if kind.name == "enum" else [kind.expected_value]
        return not any(type(each) is type(error.instance) for each in wanted)
    if branches := _alternatives(error):
        return all(any(map(_is_of_another_type, branch)) for branch in branches)
    return bool(kind.name == "type")
