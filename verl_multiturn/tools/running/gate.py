"""`Gate`: the state of a tool that the conversations of one worker share."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.calls.limits import limits_of
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.calls.owner import Owner
from verl_multiturn.calls.slots import SharedSlots, Slots
from verl_multiturn.errors import ToolContractError
from verl_multiturn.tools.base import BaseTool, is_foreign
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.loading.registry import METHODS, schema_of
from verl_multiturn.tools.running.results import CallResult


def tool_owner(tool: Any) -> Owner:
    """Return a tool as the owner of its calls."""
    return Owner(tool, "tool", METHODS, BaseTool, limits_of(tool, ToolLimits), ToolContractError)


class Gate(Slots):
    """Shared state of one tool in one worker.

    Args:
        tool: The tool.
        timeout_s: As in `Slots`.
        shared: As in `Slots`.
        outages: As in `Slots`.
    """

    def __init__(
        self, tool: Any, timeout_s: float, shared: SharedSlots | None = None, outages: Outages | None = None
    ) -> None:
        super().__init__(tool_owner(tool), timeout_s, shared, outages)
        self.limits = limits_of(tool, ToolLimits)
        self.schema = schema_of(tool)
        self.ends_conversation = bool(getattr(tool, "ends_conversation", False))
        self.is_foreign = is_foreign(tool)
        self.places: Any = getattr(tool, "places", None) if isinstance(tool, BaseTool) else None
        """Places of which each conversation needs one, `places.Places`; None: it needs none."""
        self._answers: OrderedDict[str, CallResult] = OrderedDict()

    def cache_key(self, arguments: Mapping[str, Any], kwargs: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the key under which the answer to a call is kept; None where the call is not JSON and has no key.

        Args:
            arguments: The arguments of the call.
            kwargs: The row's kwargs on which the answer depends, for each method that gets some.
        """
        try:
            return json.dumps([arguments, kwargs], sort_keys=True)
        except (TypeError, ValueError):
            return None

    def cached(self, key: str | None, call_id: str) -> CallResult | None:
        """Return the answer kept under a key, as that to a call; None where there is none."""
        if key is None or key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return _copied(self._answers[key], call_id)

    def remember(self, key: str, result: CallResult) -> None:
        """Keep an answer under a key. The one used least recently makes room."""
        self._answers[key] = _copied(result, "")
        if len(self._answers) > self.limits.cache:
            self._answers.popitem(last=False)


def _copied(result: CallResult, call_id: str) -> CallResult:
    """Return the answer to another call that gets it without an attempt."""
    return CallResult(
        call_id,
        result.tool,
        text=result.text,
        reward=result.reward,
        metrics=copy.deepcopy(result.metrics),
        images=result.images,
        cached=True,
        truncated=result.truncated,
    )
