"""`ProxyRun`: state that all sessions of a process share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.certificate.receipts import ReceiptingEngine
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.images import ReadImages, as_they_are
from verl_multiturn.chat.parsing.turns import CallParser
from verl_multiturn.config import ProxySettings
from verl_multiturn.proxy.opponents.draw import Opponents
from verl_multiturn.proxy.sessions.rendering import PromptRenderer
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.proxy.sessions.rows import Select
from verl_multiturn.proxy.sessions.turn_reading import TurnReader
from verl_multiturn.rollout.limits import Limits


@dataclass(frozen=True)
class ProxyRun:
    """The objects that all sessions of a process share."""

    engine: ReceiptingEngine
    """Samples the completions, and stops at the texts of `stop_regex` (`rollout.engines.stop_texts`)."""
    renderer: PromptRenderer
    reader: TurnReader
    limits: Limits
    """`prompt_length`, `response_length` and `turn_length` count here."""
    fill_id: int
    """Token id of the prompt of a session without requests."""
    max_completions: int | None = None
    """The most completions of a session; None: no limit."""
    max_inflight: int = 16
    """The most generations of a session at once; others wait."""
    max_rows: int | None = None
    """The most rows of a session; None: no limit."""
    select: Select | None = None
    """Returns the ids of the completions that are trained; None: all are."""
    roles: Roles | None = None
    """The roles; None: there are none."""
    outlives_engine: bool = False
    """Whether a session goes on when the engine has failed: its requests get 503 meanwhile. A trainer's session is
    invalid then, and a client's of a gateway may wait."""
    opponents: Opponents | None = None
    """Who else plays roles; None: nobody."""


def build_proxy_run(
    engine: ReceiptingEngine,
    codec: ChatCodec,
    end_ids: Sequence[int],
    parser: CallParser,
    tokenizer: Any,
    marks: Sequence[tuple[str, str]],
    limits: Limits,
    fill_id: int,
    settings: ProxySettings,
    select: Select | None = None,
    opponents: Opponents | None = None,
    read_images: ReadImages = as_they_are,
) -> ProxyRun:
    """Build the state of all sessions, for a training, an evaluation, the gateway and `serve`.

    Args:
        engine: Samples, and keeps the receipts.
        codec: Renders requests; nothing else uses it, since that happens in a thread.
        end_ids: Token ids that end a turn.
        parser: Reads the calls of a generation.
        tokenizer: The model's tokenizer.
        marks: Pairs of texts that open and close a reasoning section.
        limits: How long a row may be.
        fill_id: Token id of the prompt of a session without requests.
        settings: Those of the endpoint.
        select: Chooses the completions to train; None: all are.
        opponents: Who else plays roles; None: nobody.
        read_images: Loads the images of a request.
    """
    return ProxyRun(
        engine=engine,
        renderer=PromptRenderer(codec, end_ids, read_images),
        reader=TurnReader(parser, tokenizer, end_ids, marks),
        limits=limits,
        fill_id=fill_id,
        max_completions=settings.max_completions,
        max_rows=settings.max_rows,
        select=select,
        roles=Roles.of(settings),
        opponents=opponents,
    )
