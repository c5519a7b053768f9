"""JSON Schema of the arguments of a typed function, short: chat templates put it into every prompt.

Invariant: a title is there only where the author wrote it; pydantic's own repeat the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, to_json

from verl_multiturn.calls.json_values import NoJsonError, json_value


class SchemaGenerator(GenerateJsonSchema):
    """Generator of schemas without the titles that pydantic makes of names."""

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Ignore the warning about a field's default that JSON cannot express: the schema leaves the default out."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return that no title is made of a field's name."""
        return False

    def encode_default(self, dft: Any) -> Any:
        """Return a default as JSON.

        Args:
            dft: The default.
        """
        try:
            return super().encode_default(dft)
        except PydanticSerializationError as unknown:
            try:
                return json_value(dft)
            except NoJsonError:
                raise unknown from None


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON Schema, made as short as possible: chat templates put it into every prompt."""
    raw = model.model_json_schema(schema_generator=SchemaGenerator)
    definitions = raw.pop("$defs", {})
    schema: dict[str, Any] = {"type": "object", "properties": {}} | _plain(_untitled(raw), definitions)
    if '"$ref"' in to_json(schema).decode():  # left for types that contain themselves
        schema["$defs"] = {name: _plain(_untitled(value), {}) for name, value in definitions.items()}
    return schema


def _plain(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return a schema in which each `$ref` is replaced by the definition that it names, and classes have no titles."""
    if isinstance(schema, list):
        return [_plain(item, definitions, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions and name not in within:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain(_untitled(definitions[name]) | beside, definitions, (*within, name))
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {field: _plain(of, definitions, within) for field, of in value.items()}
        elif key in ("default", "examples", "enum", "const"):
            plain[key] = value
        elif key != "discriminator":
            plain[key] = _plain(value, definitions, within)
    return plain


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a class without its title, which is the name of the class."""
    return {key: value for key, value in schema.items() if key != "title"}
