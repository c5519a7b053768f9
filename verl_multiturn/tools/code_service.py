"""`CodeServiceTool`: runs a model's code in a service, by one of three protocols (`tools/services/code_protocols.py`).

Each call runs in a fresh sandbox, so nothing is kept between calls. For the same reason a call may be repeated when its
answer was lost: only the effects of a program outside of its sandbox would happen twice. Leave `limits.retries` at 0 if
your sandboxes can change something outside, for example a database.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import read_model
from verl_multiturn.errors import ConfigError
from verl_multiturn.old_names import UNTIL
from verl_multiturn.tools.base import ToolResponse
from verl_multiturn.tools.schema import ToolSchema
from verl_multiturn.tools.services.code_protocols import (
    PROTOCOLS,
    CodeSettings,
    NoOutcomeError,
    OtherServiceError,
)
from verl_multiturn.tools.services.http_client import HttpTool, UnavailableError


class CodeServiceTool(HttpTool):
    """The tool `code_interpreter(code)`, with an argument `language` where there are several languages.

    Args:
        config: The fields of `CodeSettings`.
        tool_schema: As in `BaseTool`; None for the tool's own.

    Raises:
        ConfigError: A setting is wrong, or another service's, or `timeout_s` is not longer than the service itself
            waits.
    """

    service = "code sandbox"
    outage_limits = OutageLimits(timeouts="model", addresses="service")  # the code may be the reason

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self._settings = _read_settings(config)
        self._protocol = PROTOCOLS[self._settings.service]
        self.path = self._protocol.path
        super().__init__(self._settings, config, tool_schema)

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

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a program.

        Returns:
            The program's output, no reward, and the metric `succeeded`: 1.0 if the service reports success, else 0.0.
            Morph's router does not report it, so that there is no metric then.

        Raises:
            ValueError: The language is none of `languages`, the service refuses the request, or it did not run the
                program to its end.
            UnavailableError: The service does not answer, or is another one than `service` names.
            ServiceFailedError: It failed at this request, broke off, or its answer cannot be read.
        """
        settings, protocol = self._settings, self._protocol
        language = self._language(parameters)
        answer = await self._ask(protocol.payload(settings, parameters["code"], language), protocol.answer)
        try:
            outcome = protocol.outcome(settings, answer)
        except NoOutcomeError as error:
            raise self._failed(error.problem, error.cause) from None
        except OtherServiceError:
            text = f"answers as another service than {settings.service!r}; correct config.service"
            raise UnavailableError(self._say(text)) from None
        shown = "\n".join(part.rstrip() for part in outcome.parts if part.strip())
        metrics = {} if outcome.succeeded is None else {"succeeded": float(outcome.succeeded)}
        return ToolResponse(shown or "[no output; print what you want to see]"), 0.0, metrics

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


def _read_settings(config: Mapping[str, Any]) -> CodeSettings:
    """Return the settings of a service, with its own defaults.

    Raises:
        ConfigError: One is wrong, or another service's.
    """
    name = config.get("service")
    protocol = PROTOCOLS.get(name) if isinstance(name, str) else None
    if protocol is None:
        # No default is known without a service; this raises, and an error of another setting comes first.
        least = {"run_timeout_s": 1.0, "timeout_s": 1.0}
        return read_model(CodeSettings, {**least, **config}, "config")
    settings = read_model(CodeSettings, {**protocol.defaults, **config}, "config")
    for other, foreign in PROTOCOLS.items():
        for key in sorted((foreign.defaults.keys() - protocol.defaults.keys()) & config.keys()):
            raise ConfigError(
                f"config.{key}={config[key]!r:.60}: service {name!r} has no such setting, but {other!r} has; "
                "leave it out"
            )
    for key in protocol.defaults:
        if getattr(settings, key) is None:
            raise ConfigError(f"config.{key}: expected a number, got None; leave it out for {protocol.defaults[key]}")
    if protocol.whole_seconds and not settings.run_timeout_s.is_integer():
        raise ConfigError(
            f"config.run_timeout_s: expected whole seconds for service {name!r}, got {settings.run_timeout_s!r}"
        )
    if settings.timeout_s <= sum(getattr(settings, wait) for wait in protocol.waits):
        raise ConfigError(
            f"config.timeout_s: {settings.timeout_s!r} is too short; expected more than "
            f"{' and '.join(protocol.waits)}{' together' * (len(protocol.waits) > 1)}"
        )
    return settings


class _NameOfBefore(CodeServiceTool):
    """Has a service by its class: a class that `tools.sandbox_fusion` or `tools.e2b_router` had in version 0.1."""

    only: ClassVar[str]

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        warnings.warn(
            f"name the class 'verl_multiturn.tools.code_service.CodeServiceTool' with 'service: {self.only}' in its "
            f"config, since the old name is understood until {UNTIL} only",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__({"service": self.only, **config}, tool_schema)


class _SandboxFusionTool(_NameOfBefore):
    only = "sandbox_fusion"


class _E2bRouterTool(_NameOfBefore):
    only = "e2b"
