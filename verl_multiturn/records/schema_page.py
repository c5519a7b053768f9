"""The part of the page of records that lists every entry, written from `schema`.

    python -m verl_multiturn.records.schema_page

writes it into the page of this checkout; a test compares the two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from verl_multiturn.records import schema

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "records.md"
BEGIN = "<!-- Written by verl_multiturn/records/schema_page.py from verl_multiturn/records/schema.py. -->"
END = "<!-- End of what is written. -->"
_PLAIN = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null", Any: "anything"}
_FILES = {
    "RunFile": "`run-<start>.json`",
    "Record": "`….jsonl.gz`",
    "ConversationLine": "`….lines.jsonl`",
    "Snapshot": "`….open.json`",
    "SessionLine": "`….sessions.jsonl`",
    "StepLine": "`steps.jsonl`",
}
_COLUMN = re.compile(r'^ {8}\("(\w+)", (.+?)\),(?:  # (.+))?$', re.MULTILINE)


def write_page(page: str) -> str:
    """Return the page with the entries between its two marks.

    Args:
        page: The page as it is, with the marks.
    """
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{_entries()}\n{END}{rest.split(END)[1]}"


def models() -> list[type[BaseModel]]:
    """Return the models of `schema`, those of whole files first."""
    found = [
        value
        for value in vars(schema).values()
        if inspect.isclass(value) and issubclass(value, BaseModel) and not value.__name__.startswith("_")
    ]
    found.remove(BaseModel)
    return sorted(found, key=lambda model: [*_FILES, model.__name__].index(model.__name__))  # others as they come


def _entries() -> str:
    return "\n".join([*(line for model in models() for line in _of_model(model)), *_of_join()])


def _of_model(model: type[BaseModel]) -> Iterator[str]:
    first, _, rest = inspect.cleandoc(model.__doc__ or "").partition("\n")
    place = _FILES.get(model.__name__, "")
    where = f", in {place}" if place and place not in first else ""
    yield f"\n### {model.__name__}\n"
    yield f"{first.removesuffix('.')}{where}.{rest and f'{chr(10)}{rest}'}\n"
    yield "| entry | form | what it is |"
    yield "|---|---|---|"
    forms = get_type_hints(model)
    for name, field in model.model_fields.items():
        what = " ".join((field.description or "").split())
        yield f"| `{field.alias or name}` | {_form(forms[name])} | {_safe(what)} |"


def _of_join() -> Iterator[str]:
    source = inspect.getsource(schema)
    comments = {name: comment for name, _, comment in _COLUMN.findall(source.partition("JOINED = ")[2])}
    yield "\n### The join\n"
    yield "Columns of `join/step-<step>-<start>.parquet` and `join/validation-<step>-<start>.parquet`, a row each.\n"
    yield "| column | form | what it is |"
    yield "|---|---|---|"
    for field in schema.JOINED:
        yield f"| `{field.name}` | `{field.type}` | {_safe(comments.get(field.name, ''))} |"


def _form(annotation: Any) -> str:
    """Return a type as the page names it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if annotation == schema.Number:
        return "number"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        # A number stays one word beside null.
        kept = [each for each in inner if get_origin(each) is not Literal or float not in inner]
        return " or ".join(dict.fromkeys(_form(each) for each in kept))
    if origin is list:
        return f"list of {_form(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)}: {', '.join(_form(each) for each in inner)}"
    if origin is dict:
        return "object"
    return _PLAIN.get(annotation, "anything")


def _safe(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page of this checkout."""
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
