"""Base of the tools whose service runs a model's code: the languages, the schema, the text of an answer."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import Field

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.http_client import HttpSettings, HttpTool


class CodeSettings(HttpSettings):
    """Settings of every tool whose service runs code."""

    languages: tuple[str, ...] = Field(("python",), min_length=1)
    """Languages that the model may use, by the service's names. The first one holds where a call names none."""


Settings = TypeVar("Settings", bound=CodeSettings)


class CodeServiceTool(HttpTool, Generic[Settings]):
    """Base of a tool `code_interpreter(code)`, with an argument `language` where there are several languages.

    Args:
        model: The class of the settings.
        waits: Names of the two settings for the seconds that the service itself waits. `timeout_s` has to be longer
            than both together.
        config: The fields of the settings.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong, or `timeout_s` is too short.
    """

    service = "code sandbox"
    outage_limits = OutageLimits(timeouts="model", addresses="service")  # the code may be the reason

    def __init__(
        self, model: type[Settings], waits: tuple[str, str], config: dict[str, Any], tool_schema: ToolSchema | None
    ) -> None:
        self._settings = settings = read_model(model, config, "config")
        if settings.timeout_s <= sum(getattr(settings, name) for name in waits):
            raise ConfigError(
                f"config.timeout_s: {settings.timeout_s!r} is too short; expected more than "
                f"{' and '.join(waits)} together"
            )
        super().__init__(settings, config, tool_schema)

    def get_schema(self) -> ToolSchema:
        """Return the schema: an argument `code` and, where there are several languages, `language`."""
        languages = self._settings.languages
        properties: dict[str, Any] = {
            "code": {"type": "string", "description": "A complete program. What it prints is what you get."}
        }
        if len(languages) > 1:
            properties["language"] = {"type": "string", "enum": list(languages), "description": "Its language."}
        return ToolSchema.read(
            {
                "type": "function",
                "function": {
                    "name": "code_interpreter",
                    "description": f"Run a program ({', '.join(languages)}). Nothing is kept between calls.",
                    "parameters": {"type": "object", "properties": properties, "required": ["code"]},
                },
            },
            "code_interpreter",
        )

    def _language(self, parameters: dict[str, Any]) -> str:
        """Return the language of a call.

        Raises:
            ValueError: The language is not offered; the text is for the model.
        """
        languages = self._settings.languages
        language = str(parameters.get("language", languages[0]))
        if language not in languages:
            raise ValueError(f"the language {language!r:.50} is not available; use one of: {', '.join(languages)}")
        return language


def show_output(*parts: str) -> str:
    """Return the text that the model reads after a program ran.

    Args:
        parts: Parts of the text in their order, such as the program's output, its errors, and how it ended. Empty parts
            are omitted.
    """
    shown = "\n".join(part.rstrip() for part in parts if part.strip())
    return shown or "[no output; print what you want to see]"
