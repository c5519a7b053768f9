"""`ProxyRun`: state that all sessions of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from verl_multiturn.certificate.receipts import ReceiptingEngine
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
