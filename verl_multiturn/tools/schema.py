"""Function schema of a tool in OpenAI's form, and the check of a call's arguments against it."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.json_schema.validators import SchemaError, Validator, compile_schema, subschemas


class FunctionSchema(BaseModel):
    """Name, description and parameters of a function; the parameters are a JSON Schema of type `object`."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolSchema(BaseModel):
    """Schema of a tool, `{"type": "function", "function": {…}}`, with the attributes of verl's own schema class."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionSchema

    @classmethod
    def read(cls, raw: Any, where: str) -> ToolSchema:
        """Return the schema that a mapping describes, after checking it.

        Args:
            raw: The mapping of the YAML.
            where: The place that errors name, for example `tools.yaml: tools[0].tool_schema`.

        Raises:
            ConfigError: The mapping is not a function schema, it holds a value that is not JSON, or its parameters are
                not a JSON Schema of type `object` that can be compiled (`json_schema/validators.py`).
        """
        try:
            schema = cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{where}.{path}: {first['msg']}, got {first['input']!r}; see tool_configs/ for examples"
            ) from None
        parameters = schema.function.parameters
        if wrong := _not_json(schema.function.model_dump(exclude_unset=True), "function"):
            raise ConfigError(f"{where}.{wrong[0]}: {show(wrong[1])} is no JSON; write it in quotes, if it is a text")
        try:
            schema._validator  # noqa: B018  # made now, to find schemas that cannot be compiled
        except SchemaError as error:
            path = ".".join(str(part) for part in ("function", "parameters", *error.path))
            raise ConfigError(f"{where}.{path}: {error}") from None
        if parameters.get("type") != "object":
            raise ConfigError(
                f"{where}.function.parameters.type: expected 'object', got {parameters.get('type')!r}; "
                "a tool's arguments are named"
            )
        return schema

    @classmethod
    def of(cls, given: Any, where: str) -> ToolSchema:
        """Return a schema that is given in any form: as it is, as a mapping, or as an object of verl's schema class.

        Args:
            given: The schema.
            where: As in `read`.

        Raises:
            ConfigError: It is none of these, or wrong.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls.read(dict(given), where)
        if isinstance(given, BaseModel):
            return cls.read(given.model_dump(exclude_unset=True, exclude_none=True), where)
        if inspect.iscoroutine(given):
            given.close()  # else Python warns of it, at some later moment
        raise ConfigError(
            f'{where}: expected {{"type": "function", "function": {{…}}}} or a ToolSchema, got {show(given, 100)}; see '
            "tool_configs/ for examples"
        )

    @cached_property
    def _validator(self) -> Validator:
        return compile_schema(self.function.parameters)

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out the validator, which cannot be pickled: verl's own tools send themselves to a Ray actor."""
        state = super().__getstate__()
        return {**state, "__dict__": {key: value for key, value in state["__dict__"].items() if key != "_validator"}}

    def check_values(self, where: str) -> None:
        """Refuse a value under `enum`, `const`, `default` or `examples` that the `type` beside it refuses.

        No model could write such a value. It most often is a text that the schema's author did not quote. A `default`
        of null is none.

        Args:
            where: As in `read`.

        Raises:
            ConfigError: There is such a value.
        """
        for path, part in subschemas(self.function.parameters):
            if "type" not in part:
                continue
            own = compile_schema({"type": part["type"]})
            values: list[tuple[tuple[Any, ...], Any]] = [
                ((key,), part[key]) for key in ("const", "default") if key in part
            ]
            for key in ("enum", "examples"):
                listed = part.get(key)  # to draft-04 `examples` may be anything
                values += [((key, index), value) for index, value in enumerate(listed if type(listed) is list else [])]
            for at, value in values:
                if not own.is_valid(value) and (at != ("default",) or value is not None):
                    place = ".".join(map(str, ("function", "parameters", *path, *at)))
                    raise ConfigError(
                        f"{where}.{place}: {value!r:.100} is not of the type beside it, {part['type']!r}; quote it if "
                        "it is a text, write true or false for a truth value, or mend the type"
                    )

    def as_dict(self) -> dict[str, Any]:
        """Return the mapping as its author wrote it, for the chat template."""
        return self.model_dump(exclude_unset=True)

    def read_arguments(self, text: str) -> tuple[dict[str, Any] | None, str]:
        """Read and check the arguments of a call.

        Args:
            text: The arguments as JSON.

        Returns:
            The arguments and an empty text; or None and their fault, in words for the model.
        """
        try:
            arguments = json.loads(text)
            if not text.isascii() or "\\u" in text:
                json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return None, "the arguments hold half a character (a lone surrogate), which no file or socket takes"
        except (ValueError, RecursionError):
            return None, "the arguments are no valid JSON"
        if not isinstance(arguments, dict):
            return None, f"the arguments must be a JSON object, not {type(arguments).__name__}"
        try:
            if self._validator.is_valid(arguments):
                return arguments, ""
            problem = next(self._validator.iter_errors(arguments))
        except ValueError:  # the validator allows less nesting than the JSON parser
            return None, "the arguments are nested too deeply"
        path = ".".join(str(part) for part in problem.instance_path)
        return None, f"argument {path!r}: {problem.message:.500}" if path else f"{problem.message:.500}"


def _not_json(value: Any, path: str) -> tuple[str, Any] | None:
    """Return the path and value of the first value or key that JSON does not know; None if there is none."""
    if value is None or isinstance(value, str | bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, value)
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            return path, strange[0]
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return path, value
    return next((wrong for key, item in items if (wrong := _not_json(item, f"{path}.{key}"))), None)
