"""JSON Schemas, compiled for the checks of arguments.

Invariants:
- nothing is fetched, whatever `$schema`, `$id` and `$ref` name;
- a schema is read by the draft that its `$schema` names, and by 2020-12 without one;
- a schema that cannot be compiled is refused with its path and its own cause.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jsonschema_rs

from verl_multiturn.json_schema.patterns import plain_pattern

Validator = jsonschema_rs.Validator

_DRAFTS: dict[str, type[Validator]] = {
    "draft-04/schema": jsonschema_rs.Draft4Validator,
    "draft-06/schema": jsonschema_rs.Draft6Validator,
    "draft-07/schema": jsonschema_rs.Draft7Validator,
    "draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
    "schema": jsonschema_rs.Draft202012Validator,
}
_DEFAULT = jsonschema_rs.Draft202012Validator
_DRAFT = re.compile(r"https?://json-schema\.org/(?P<draft>[\w/-]+?)#?")
# Keys whose values map names to schemas, and keys whose values are not schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "type"})
# Words that draft-07 or 2019-09 knows and 2020-12 does not, or the other way round.
_OF_ONE_DRAFT = frozenset(
    {
        *("additionalItems", "id", "$id", "$recursiveRef", "$recursiveAnchor", "$dynamicRef", "$anchor"),
        *("prefixItems", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("minContains", "maxContains"),
    }
)
_NAME_IT = ", or name the draft in '$schema'"
_HINTS = {
    "exclusiveMinimum": (
        f"is draft-04's; write the bound itself, as exclusiveMinimum: 0, and leave 'minimum' out{_NAME_IT}"
    ),
    "exclusiveMaximum": (
        f"is draft-04's; write the bound itself, as exclusiveMaximum: 9, and leave 'maximum' out{_NAME_IT}"
    ),
    "items": f"is a tuple of an older draft; write prefixItems{_NAME_IT}",
    "required": "is draft-03's; list the names of required arguments beside 'properties'",
}


_MOST_UNFOLDED = 100_000
_DEFINITIONS = frozenset({"$defs", "definitions"})


class SchemaError(ValueError):
    """A schema that cannot be compiled.

    Attributes:
        path: Keys and indices that lead to the fault.
    """

    def __init__(self, problem: str, path: tuple[Any, ...] = ()) -> None:
        super().__init__(problem)
        self.path = path


def compile_schema(schema: Mapping[str, Any]) -> Validator:
    """Compile a schema.

    An expression of JavaScript that this package's validator does not know is rewritten, where it has a plain equal.

    Args:
        schema: The schema; it holds nothing but JSON.

    Raises:
        SchemaError: It is not a JSON Schema of its draft, the draft is unknown, an expression cannot be compiled, or a
            `$ref` leads out of the schema.
    """
    make = draft_of(schema)
    try:
        if _unfolded(schema, schema, {}) > _MOST_UNFOLDED:
            raise SchemaError(
                f"its references unfold to more than {_MOST_UNFOLDED:,} schemas, each of which a call would be checked "
                "against; refer to the same schema less often"
            )
        return make(_rewritten({key: value for key, value in schema.items() if key != "$schema"}, ()), offline=True)
    except SchemaError:
        raise
    except jsonschema_rs.ReferencingError as error:
        raise SchemaError(f"a reference cannot be read: {_line(error)}") from None
    except jsonschema_rs.ValidationError as error:
        if error.kind.name == "$ref":
            raise _unresolved(schema, error) from None
        raise SchemaError(_problem(error), tuple(error.instance_path)) from None
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"it cannot be compiled: {_line(error)}; write it with less nesting") from None


@lru_cache(maxsize=512)
def validator_of(schema: str) -> Validator | None:
    """Return the validator of a schema, given as JSON text; None if the schema cannot be compiled."""
    try:
        return compile_schema(json.loads(schema))
    except SchemaError:
        return None


def draft_of(schema: Mapping[str, Any]) -> type[Validator]:
    """Return the validator's class for the draft that a schema names; 2020-12 where it names none.

    Raises:
        SchemaError: The schema names no draft that is known.
    """
    if "$schema" not in schema:
        return _DEFAULT
    named = schema["$schema"]
    found = _DRAFT.fullmatch(named) if isinstance(named, str) else None
    if found is None or found["draft"] not in _DRAFTS:
        raise SchemaError(
            f"the draft {named!r:.200} is not known, and nothing is fetched; leave '$schema' out, or name one of "
            f"{', '.join(f'http://json-schema.org/{name}' for name in _DRAFTS)}",
            ("$schema",),
        )
    return _DRAFTS[found["draft"]]


def without_draft(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without `$schema`, where all drafts read the rest alike; otherwise as it is.

    Servers name a draft by habit. In a prompt it is a text that no model needs.
    """
    if schema.get("$schema") is None:
        return {key: value for key, value in schema.items() if key != "$schema"}
    try:
        draft = draft_of(schema)
    except SchemaError:
        return dict(schema)
    near = (jsonschema_rs.Draft7Validator, jsonschema_rs.Draft201909Validator)
    if draft is _DEFAULT or (draft in near and not any(_is_of_one_draft(part) for _, part in subschemas(schema))):
        return {key: value for key, value in schema.items() if key != "$schema"}
    return dict(schema)


def subschemas(schema: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield a schema and each schema within it, with the path that leads there."""
    if isinstance(schema, Mapping):
        yield path, dict(schema)
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, Mapping):
                for name, inner in value.items():
                    yield from subschemas(inner, (*path, key, name))
            elif key not in _VALUES:
                yield from subschemas(value, (*path, key))
    elif isinstance(schema, list | tuple):
        for index, inner in enumerate(schema):
            yield from subschemas(inner, (*path, index))


def _unfolded(schema: Any, root: Mapping[str, Any], known: dict[str, int]) -> int:
    """Return how many schemas a schema has with each local `$ref` in it unfolded; a circle is unfolded once.

    Args:
        schema: The schema, or a part of it.
        root: The whole schema.
        known: Numbers of the targets that were seen before.
    """
    count = 0
    for _, part in subschemas({key: value for key, value in schema.items() if key not in _DEFINITIONS}):
        count += 1
        target = part.get("$ref")
        if not isinstance(target, str) or not target.startswith("#"):
            continue
        if target not in known:
            known[target] = 1  # within itself
            found: Any = root
            for name in target.removeprefix("#").split("/")[1:]:
                found = found.get(name) if isinstance(found, Mapping) else None
            known[target] = _unfolded(found, root, known) if isinstance(found, Mapping) else 1
        count += known[target]
    return count


def _is_of_one_draft(part: Mapping[str, Any]) -> bool:
    return (
        bool(_OF_ONE_DRAFT & part.keys()) or isinstance(part.get("items"), list) or ("$ref" in part and len(part) > 1)
    )


def _rewritten(schema: Any, path: tuple[Any, ...]) -> Any:
    """Return a schema in which the validator knows each expression."""
    if isinstance(schema, list | tuple):
        return [_rewritten(inner, (*path, index)) for index, inner in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            made[key] = _expression(value, (*path, key))
        elif key in _NAMED and isinstance(value, Mapping):
            write: Callable[..., str] = _expression if key == "patternProperties" else lambda name, _: name
            made[key] = {
                write(name, (*path, key, name)): _rewritten(inner, (*path, key, name)) for name, inner in value.items()
            }
        else:
            made[key] = value if key in _VALUES else _rewritten(value, (*path, key))
    return made


def _is_known(pattern: str) -> bool:
    try:
        for make in (_DEFAULT, jsonschema_rs.Draft4Validator):  # older drafts refuse more
            make({"pattern": pattern}, offline=True)
    except jsonschema_rs.ValidationError:
        return False
    return True


def _expression(pattern: str, path: tuple[Any, ...]) -> str:
    """Return a regular expression as the validator knows it."""
    if _is_known(pattern):
        return pattern
    try:
        plain = plain_pattern(pattern)
    except ValueError as error:
        raise SchemaError(f"the regular expression {pattern!r:.200} cannot be used: {error}", path) from None
    if _is_known(plain):
        return plain
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about style in the expression
            re.compile(pattern)
        why = "JavaScript's expressions, which JSON Schema uses, do not know it"
    except (re.error, RecursionError, OverflowError) as error:
        why = str(error)
    raise SchemaError(f"the regular expression {pattern!r:.200} cannot be compiled ({why}); mend it", path)


def _unresolved(schema: Mapping[str, Any], error: jsonschema_rs.ValidationError) -> SchemaError:
    line = _line(error)
    for path, part in subschemas(schema):
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            target = part.get(key)
            if isinstance(target, str) and f"{target.lstrip('#')}'" in line:
                # The validator names the address, and the library that it would need to fetch it.
                cause = line if target.startswith("#") else f"{target!r} is not in the schema, and nothing is fetched"
                return SchemaError(
                    f"a {key} cannot be resolved ({cause}); write what it refers to beneath $defs", (*path, key)
                )
    return SchemaError(f"a $ref cannot be resolved ({line}); write what it refers to beneath $defs")


def _problem(error: jsonschema_rs.ValidationError) -> str:
    """Explain why a draft refuses a schema."""
    last = error.instance_path[-1] if error.instance_path else None
    hint = _HINTS.get(last) if isinstance(last, str) else None
    value = error.instance
    if hint is not None and (isinstance(value, list) if last == "items" else isinstance(value, bool)):
        return f"no valid JSON Schema: {json.dumps(value):.200} {hint}"
    if last == "type":
        return (
            f"no valid JSON Schema: {value!r:.200} is no type; expected one or a list of array, boolean, integer, "
            "null, number, object, string"
        )
    return f"no valid JSON Schema: {error.message:.500}"


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:500]
