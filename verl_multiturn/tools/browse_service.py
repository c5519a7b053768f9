"""`BrowseServiceTool`: opens pages through a service, such as `retrieval_server.py`.

POST /browse {"page": "Paris", "part": 1, "part_characters": 4000}
→ {"title": "Paris", "text": "…", "parts": 3}

`title` is null where there is no such page. Where there is no such part, `text` is empty, and `parts` is their number.
A service of your own may fetch `page` from the web, and pass on the status 404 or 410 of a page.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from verl_multiturn.config import read_model
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.browse import PartSettings, browse_schema, read_page, show_part
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.http_client import HttpSettings, HttpTool


class BrowseServiceSettings(HttpSettings, PartSettings):
    """Settings of the tool: of the service and of the parts."""


class _PagePart(BaseModel):
    title: str | None
    text: str = ""
    parts: int = Field(0, ge=0)


class BrowseServiceTool(HttpTool):
    """The tool `browse(page, part)`.

    Args:
        config: The fields of `BrowseServiceSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong.
    """

    pure = True
    service = "browse server"
    path = "/browse"
    not_found = (404, 410)

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = read_model(BrowseServiceSettings, config, "config")
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
            ValueError: There is no such page or part, or the server refuses the request; the text is for the model.
            UnavailableError: The server does not answer.
            ServiceFailedError: It failed at this request, broke off, or its answer cannot be read.
        """
        name, part = read_page(parameters)
        most = self._settings.part_characters
        found = await self._ask({"page": name, "part": part, "part_characters": most}, _PagePart)
        if len(found.text) > most:
            raise self._unreadable(f"a part of {len(found.text)} characters")
        text = show_part(name, found.title, found.text, part, found.parts)
        return ToolResponse(text), 0.0, {"parts": found.parts}
