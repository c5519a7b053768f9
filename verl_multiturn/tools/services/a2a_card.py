"""The card of an A2A agent: the settings of its entry, where the card is, and the address for messages."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
from a2a.client.card_resolver import parse_agent_card
from a2a.types import AgentCard
from google.protobuf.json_format import ParseError
from pydantic import BaseModel, ConfigDict, Field

from verl_multiturn.clients.http_connections import open_client, remedy, route_to, trusted
from verl_multiturn.describe import describe, message_of
from verl_multiturn.errors import ConfigError
from verl_multiturn.tools.services.a2a_http import BoundedClient
from verl_multiturn.tools.services.environment_variables import expand, header, shown

BINDING = "JSONRPC"
"""The one binding of A2A that this client speaks."""
_CARDS = ("/.well-known/agent-card.json", "/.well-known/agent.json")
"""Where a card is, today and before A2A 0.3."""


class A2aSettings(BaseModel):
    """Settings under `a2a`. Values of `headers`, `url` and `address` may hold `${NAME}`, an environment variable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """Address of the agent, below which its card is, or that of the card itself (`….json`)."""
    address: str | None = None
    """Address to which messages go; null: the one in the card, which has to be on the host of `url`."""
    headers: dict[str, str] = Field(default={})

    include: list[str] = Field(default=["*"])
    """Patterns (`fnmatch`) of the agent's skills that the model reads about, or gets as tools."""
    exclude: list[str] = Field(default=[])
    """Patterns of skills that are left out, although `include` names them."""
    prefix: str = ""
    """Text put before the name of each tool."""
    start_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds in which the agent has to send its card."""

    @property
    def label(self) -> str:
        """Name of the agent in messages, without user and password, which may be secrets."""
        return repr(shown(self.url))


def fetch_card(settings: A2aSettings, where: str) -> AgentCard:
    """Fetch an agent's card; may be called while an event loop runs.

    Args:
        settings: The settings of the agent.
        where: The place that errors name, for example `tools.yaml: tools[0].a2a`.

    Raises:
        ConfigError: There is none, it cannot be read, or a setting is wrong.
    """
    url = expand(settings.url, f"{where}.url")
    parsed = httpx.URL(url) if url.isprintable() else httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{where}.url: {settings.url!r:.200} is no address; give one such as 'http://agent:9999'")
    headers = {name: header(value, f"{where}.headers.{name}") for name, value in settings.headers.items()}
    route = route_to(url, f"{where}.url")
    places = (
        [parsed]
        if parsed.path.endswith(".json")
        else [parsed.copy_with(raw_path=(parsed.path.rstrip("/") + path).encode()) for path in _CARDS]
    )

    async def fetch() -> AgentCard:
        async with asyncio.timeout(settings.start_timeout_s):
            async with open_client(BoundedClient, route, timeout=None, verify=trusted(url)) as client:
                for place in places:
                    response = await client.get(place, headers=headers)
                    if response.status_code != 404:
                        break
                if response.status_code != 200:
                    said = remedy(response.status_code, route, f"{where}.url", f"{where}.headers")
                    raise ConfigError(f"HTTP {response.status_code}{route.words}{said}")
                return parse_agent_card(json.loads(response.content))

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(asyncio.run, fetch()).result()
        except TimeoutError:
            why = f"no answer within {settings.start_timeout_s:g} s"
        except (ParseError, ValueError, RecursionError) as error:  # a ConfigError is a ValueError, too
            why = message_of(error)
        except httpx.HTTPError as error:
            why = f"{describe(error)}{route.words}"
    paths = " or ".join(place.path for place in places)
    raise ConfigError(
        f"{where}: the agent at {settings.label} has no card that can be read at {paths} ({why:.500}); start the "
        "agent, or give the address of its card"
    )


def message_address(card: AgentCard, settings: A2aSettings, where: str) -> str:
    """Return the address to which messages to an agent go.

    Raises:
        ConfigError: The agent does not speak JSON-RPC, or its card leads to another host.
    """
    offered = [each.protocol_binding for each in card.supported_interfaces]
    found = [each.url for each in card.supported_interfaces if each.protocol_binding == BINDING]
    if not found:
        raise ConfigError(
            f"{where}: the agent at {settings.label} speaks {', '.join(offered) or 'nothing'}; expected {BINDING}"
        )
    if settings.address is not None:
        return expand(settings.address, f"{where}.address")
    own, its = httpx.URL(expand(settings.url, f"{where}.url")), httpx.URL(found[0])
    if (its.scheme, its.host, its.port) != (own.scheme, own.host, own.port):
        raise ConfigError(
            f"{where}: the card of {settings.label} leads to {shown(found[0])!r}, another host, where no headers are "
            "sent; name the agent's address under 'address'"
        )
    return str(its.copy_with(userinfo=own.userinfo))
