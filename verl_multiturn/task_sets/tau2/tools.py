"""The tools of a domain of τ², for a model: `toolset: verl_multiturn.task_sets.tau2.tools.domain_tools` in the YAML.

Schemas and docstrings are τ²'s own. A call goes to the world of its conversation, which `TauUser` opened.
"""

from __future__ import annotations

from typing import Any

from verl_multiturn.task_sets.tau2.package import check_domain, tool_schemas
from verl_multiturn.task_sets.tau2.worlds import world_of
from verl_multiturn.tools.base import BaseTool, ToolResponse
from verl_multiturn.tools.schema import ToolSchema


class TauTool(BaseTool):
    """One tool of a domain.

    Args:
        domain: The domain.
        tool_schema: The tool's schema.
    """

    def __init__(self, domain: str, tool_schema: ToolSchema) -> None:
        super().__init__({"domain": domain}, tool_schema)
        self._domain = domain

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Look for the conversation's world.

        Raises:
            ConfigError: It has none, or one of another domain.
        """
        world_of(instance_id, self._domain)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Make the call, and return τ²'s answer, also where its tool raises.

        Raises:
            EnvironmentOutageError: There is no process for the world.
        """
        content, failed = await world_of(instance_id, self._domain).call(self.name, parameters)
        return ToolResponse(text=content), 0.0, {"failed": float(failed)}


def domain_tools(domain: str) -> list[TauTool]:
    """Return the tools of a domain.

    Args:
        domain: `airline` or `retail`.

    Raises:
        ConfigError: There is no such domain, or something is not installed.
    """
    where = "domain_tools: config.domain"
    check_domain(domain, where)
    return [TauTool(domain, ToolSchema.read(raw, f"{where}: {name}")) for name, raw in tool_schemas(domain).items()]
