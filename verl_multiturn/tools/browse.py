"""`BrowseTool`: opens a page of a folder of documents, part by part; `SearchTool` of the same corpus finds the pages.

A page is a document. Passages of one title, as in the Wikipedia of 2018 (`wiki-18`), are one page together.

Invariants:
- the parts of a page together are its text, character by character; a part ends at a blank where there is one in its
  second half;
- the same page and part give the same answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.config import read_model
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.bm25 import Bm25Index
from verl_multiturn.tools.corpus import CorpusSettings, CorpusTool
from verl_multiturn.tools.schema import ToolSchema

_NAME_CHARACTERS = 1_000
_SHOWN_CHARACTERS = 200
"""Characters of a title that are shown."""


class PartSettings(BaseModel):
    """Settings of every tool that opens pages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    part_characters: int = Field(4_000, ge=20, le=100_000)
    """The most characters of a part. A part has to fit into the limit of a tool response, or its text is cut there."""


class BrowseSettings(CorpusSettings, PartSettings):
    """Settings of the browse tool: of the corpus and of the parts."""


class BrowseTool(CorpusTool):
    """The tool `browse(page, part)`.

    Args:
        config: The fields of `BrowseSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong, or the corpus has no files.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = read_model(BrowseSettings, config, "config")
        super().__init__(self._settings, config, tool_schema)

    def get_schema(self) -> ToolSchema:
        """Return the schema: the name of a page, and the number of a part, which is 1 unless given."""
        return browse_schema()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Open a part of a page.

        Returns:
            The part as text, no reward, and the metric `parts`, the number of parts that the page has.

        Raises:
            ValueError: There is no such page or part; the text is for the model.
            ConfigError: The index could not be built.
        """
        name, part = read_page(parameters)
        index = await self._index()
        # In a thread: a page may have megabytes.
        title, text, parts = await asyncio.to_thread(open_part, index, name, part, self._settings.part_characters)
        return ToolResponse(show_part(name, title, text, part, parts)), 0.0, {"parts": parts}


def browse_schema() -> ToolSchema:
    """Return the schema of a tool `browse` with the arguments `page` and `part`."""
    page = {"type": "string", "description": "The page's title, as `search` shows it."}
    part = {"type": "integer", "minimum": 1, "description": "Which part of a long page; 1 if left out."}
    return ToolSchema.read(
        {
            "type": "function",
            "function": {
                "name": "browse",
                "description": "Open a page. A long page has several parts.",
                "parameters": {"type": "object", "properties": {"page": page, "part": part}, "required": ["page"]},
            },
        },
        "browse",
    )


def read_page(parameters: dict[str, Any]) -> tuple[str, int]:
    """Return the name of the page and the number of the part that a call asks for.

    Args:
        parameters: The arguments of the call.

    Raises:
        ValueError: There is no name, it is too long, or the number is below 1. The text is for the model.
    """
    name, part = parameters["page"], parameters.get("part", 1)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("name the page: give its title as `search` shows it")
    if len(name) > _NAME_CHARACTERS:
        raise ValueError(f"the page's name has {len(name)} characters; give its title as `search` shows it")
    if not isinstance(part, int) or part < 1:
        raise ValueError(f"there is no part {part!r:.20}; parts are counted from 1")
    return name, part


def open_part(index: Bm25Index, name: str, part: int, characters: int) -> tuple[str | None, str, int]:
    """Return the title of a page, a part's text, and how many parts there are.

    The title is None where there is no such page, and the text is empty where there is no such part.

    Args:
        index: The index of the corpus.
        name: Name of the page.
        part: Number of the part, from 1.
        characters: The most characters of a part.
    """
    pages = [document.page() for document in index.page(name)]
    if not pages:
        return None, "", 0
    parts = cut("\n\n".join(text for _, text in pages), characters)
    return pages[0][0], parts[part - 1] if part <= len(parts) else "", len(parts)


def cut(text: str, characters: int) -> list[str]:
    """Return the parts of a text, at least one; each but the last ends at a blank where its second half has one.

    Args:
        text: The text.
        characters: The most characters of a part.
    """
    parts, start = [], 0
    while len(text) - start > characters:
        end, half = start + characters, start + characters // 2
        blank = max(text.rfind(" ", half, end), text.rfind("\n", half, end))
        end = end if blank < 0 else blank + 1
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def show_part(name: str, title: str | None, text: str, part: int, parts: int) -> str:
    """Return the text that the model reads of a part.

    Args:
        name: The model's name of the page.
        title: Title of the page; None: there is no such page.
        text: Text of the part.
        part: Number of the part.
        parts: How many parts the page has.

    Raises:
        ValueError: There is no such page or part; the text is for the model.
    """
    if title is None:
        raise ValueError(f"there is no page {name.strip()[:80]!r}; search for it, and give a title that is shown")
    title = title[:_SHOWN_CHARACTERS]
    if part > parts:
        raise ValueError(f"the page {title[:80]!r} has {parts} part{'' if parts == 1 else 's'}, and no part {part}")
    if parts == 1:
        return f"{title}\n{text.strip() or '(The page is empty.)'}"
    return f"{title} (part {part} of {parts})\n{text.strip()}"
