"""`Owner`: an author's object, and all that its calls need to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.calls.invocation import Invocation, is_coroutine_method, task_name
from verl_multiturn.calls.limits import CallLimits
from verl_multiturn.calls.outages.guarded_call import Role
from verl_multiturn.calls.timeline import Kind
from verl_multiturn.errors import MultiTurnError


class Owner:
    """An author's object whose methods are called in conversations: a tool or an interaction.

    Args:
        made: The object; it has a `name`.
        kind: One of `KINDS`.
        methods: Names of its four methods: which begins a conversation, is called in it, gives its reward, and ends it.
        base: The class from which it may derive. Of the four methods all but the second do nothing there.
        limits: Limits of its calls.
        contract_error: The error of an object, or of our own code, that does not keep the contract.

    Attributes:
        begin: Name of the method that begins a conversation.
        end: Name of the method that ends it.
        spans: The label of a call of each method in a conversation's timeline.
        roles: The role of each method but the last, where an outage is looked for.
        inherited: Names of the methods that need no call, since the object has those of `base` that do nothing.
    """

    def __init__(
        self,
        made: Any,
        kind: str,
        methods: Sequence[str],
        base: type,
        limits: CallLimits,
        contract_error: type[MultiTurnError],
    ) -> None:
        self.made = made
        self.kind = kind
        self.name: str = made.name
        self.limits = limits
        self.contract_error = contract_error
        self.begin, called, reward, self.end = methods
        named: Sequence[Kind] = ("create", "call", "reward") if kind == "tool" else ("interaction",) * 3
        spans = zip((self.begin, called, reward, self.end), (*named, "release"), strict=True)
        self.spans: dict[str, Kind] = dict(spans)
        is_repeatable = kind == "tool" and bool(getattr(made, "repeatable", False))
        self.roles: dict[str, Role] = {
            self.begin: "create" if kind == "tool" else "call",
            called: "repeatable" if is_repeatable else "call",
            reward: "score",
        }
        self.inherited = frozenset(
            method
            for method in (self.begin, reward, self.end)
            if getattr(type(made), method, None) is getattr(base, method)
        )
        self.is_coroutine = {method: is_coroutine_method(getattr(made, method)) for method in methods}
        self._task_names = {method: task_name(kind, self.name, method) for method in methods}

    def invoke(self, method: str, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Invocation:
        """Start a call of a method.

        Raises:
            TypeError: The method does not take these arguments.
        """
        function = getattr(self.made, method)
        return Invocation(function, self.is_coroutine[method], arguments, kwargs, self._task_names[method])
