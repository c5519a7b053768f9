"""Interactions written for verl 0.4 to 0.6, which work as they are: `adapted` makes an `Interaction` of one.

verl later deleted its `verl.interactions`. Where it has none, `modules.py` lets the old names find these classes.

Differences from the old loops, all on purpose:
- every whole answer goes to `generate_response`, the last allowed one as well;
- `calculate_score` is called once at the end, and `finalize_interaction` once for every start: verl called neither;
- a text that comes with `should_terminate` is not shown to the model any more.
"""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from verl_multiturn.calls.invocation import Invocation, is_coroutine_method, task_name
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError, InteractionContractError
from verl_multiturn.interactions.base import Interaction, Reply

OLD_CALLS = ("start_interaction", "generate_response")
"""Names of the methods that take a row's kwargs."""
_ENDS = ("calculate_score", "finalize_interaction")


class BaseInteraction:
    """The class from which interactions for verl 0.4 to 0.6 derive. For new ones derive from `Interaction`.

    Args:
        config: The `config` mapping of the YAML entry, with the entry's name under `name`.

    Attributes:
        config: As given.
        name: The entry's name.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation, and return its id.

        Args:
            instance_id: Id of the conversation; None to make one.
            kwargs: The row's kwargs.
        """
        return uuid.uuid4().hex if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer a turn of the model.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation so far.
            kwargs: The row's kwargs.

        Returns:
            Whether the conversation is over, the answer, the score of the turn, and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_response()")

    # Old classes define these two with the conversation's id, or without it as here. Both are called rightly.
    async def calculate_score(self, *ids: str, **kwargs: Any) -> float:
        """Return the score of a conversation, for which an id is given."""
        return 0.0

    async def finalize_interaction(self, *ids: str, **kwargs: Any) -> None:
        """End a conversation, for which an id is given."""


class _AnswerByAnswer(BaseInteraction):
    """An interaction that keeps the last text it scored of each conversation, and the truth it scores by."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        # By this name and these keys, since classes that derive from verl's use them.
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Begin a conversation, and return its id.

        Args:
            instance_id: Id of the conversation; None to make one.
            ground_truth: The row's correct answer.
            kwargs: Not used.
        """
        own = await super().start_interaction(instance_id)
        self._instance_dict[own] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return own

    async def finalize_interaction(self, *ids: str, **kwargs: Any) -> None:
        """Forget a conversation."""
        self._instance_dict.pop(ids[0], None)


class Gsm8kInteraction(_AnswerByAnswer):
    """A user who checks each answer to a grade-school problem, until one is right.

    The verdict is that of verl's class, which compares text: in the last 300 characters of the turn the last number
    after `#### ` is the ground truth, without its thousands separators. `#### 42.` and `#### 42.0` are not `42`.
    """

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Judge the model's last turn.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation so far.
            kwargs: Not used.
        """
        self._instance_dict[instance_id]["response"] = _last_content(messages, "assistant", "")
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Your response is correct!", score, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", score, {}

    async def calculate_score(self, *ids: str, **kwargs: Any) -> float:
        """Return 1.0 if the last turn states the ground truth, otherwise 0.0."""
        kept = self._instance_dict[ids[0]]
        stated = _stated_number(kept["response"] or "")
        return float(stated is not None and stated == kept["ground_truth"])


class WeatherInteraction(_AnswerByAnswer):
    """A user who is content, and ends the conversation, once the model has called a tool."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Report whether a tool has answered; the conversation is over in any case.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation so far.
            kwargs: Not used.
        """
        self._instance_dict[instance_id]["response"] = _last_content(messages, "tool", _NO_CALL)
        score = await self.calculate_score(instance_id)
        text = "Thank you for your weather query!" if score else _ASK_FOR_A_CALL
        return True, text, score, {}

    async def calculate_score(self, *ids: str, **kwargs: Any) -> float:
        """Return 1.0 if a tool has answered, otherwise 0.0."""
        return float(self._instance_dict[ids[0]]["response"] != _NO_CALL)


_NO_CALL = "no tool call"
_ASK_FOR_A_CALL = "Please use the weather tool to get the weather information."
_LAST_CHARACTERS = 300
_STATED = re.compile(r"#### (-?[0-9.,]+)")


def _last_content(messages: Sequence[Mapping[str, Any]], role: str, otherwise: str) -> Any:
    return next((message.get("content") for message in reversed(messages) if message.get("role") == role), otherwise)


def _stated_number(text: str) -> str | None:
    """Return the number that a turn states, as verl reads it; None where it states none."""
    stated = _STATED.findall(text[-_LAST_CHARACTERS:])
    return stated[-1].replace(",", "") if stated else None


def is_old_class(found: Any) -> bool:
    """Return whether a class is an interaction for verl 0.4 to 0.6."""
    return callable(getattr(found, "generate_response", None)) and not issubclass(found, Interaction)


class AdaptedInteraction(Interaction):
    """An `Interaction` made of an object of an old class. `adapted` makes it.

    Args:
        old: The object.

    Attributes:
        old: As given.

    Raises:
        ConfigError: A method is missing, or cannot be called with a conversation's id, nor without.
    """

    def __init__(self, old: Any) -> None:
        super().__init__(getattr(old, "config", {}))
        self.old = old
        self.outage_limits = getattr(old, "outage_limits", self.outage_limits)  # type: ignore[misc]
        self.name = str(getattr(old, "name", ""))
        for method in (*OLD_CALLS, *_ENDS):
            if not callable(getattr(old, method, None)):
                raise ConfigError(
                    f"{type(old).__name__} has no method {method!r}; derive it from verl.interactions.base."
                    "BaseInteraction, which has all four"
                )
        self._takes_id = {method: _takes_id(old, method) for method in _ENDS}
        self._takes_name = {method: _takes_name(getattr(old, method)) for method in OLD_CALLS}

    async def start(self, instance_id: str, **kwargs: Any) -> Reply | None:
        """Begin a conversation; an old class has no first message.

        Args:
            instance_id: Id of the conversation. Whatever id the class returns, the old loops went on with theirs.
            kwargs: The row's kwargs.
        """
        await _call(self.old.start_interaction, instance_id, **self.named("start_interaction", kwargs))
        return None

    async def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Answer a turn of the model.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation so far.
            kwargs: The row's kwargs.

        Raises:
            InteractionContractError: The class did not return a value of the old contract.
        """
        kwargs = self.named("generate_response", kwargs)
        returned = await _call(self.old.generate_response, instance_id, list(messages), **kwargs)
        return _read_response(type(self.old).__name__, returned)

    async def score(self, instance_id: str) -> float:
        """Return the score of `calculate_score`; 0.0 where it returns None, since verl never used it."""
        score = await self._end("calculate_score", instance_id)
        return 0.0 if score is None else score

    async def close(self, instance_id: str) -> None:
        """End a conversation by `finalize_interaction`."""
        await self._end("finalize_interaction", instance_id)

    async def aclose(self) -> None:
        """Close the state that all conversations share, if the class has an `aclose` of its own."""
        if callable(close := getattr(self.old, "aclose", None)):
            await _call(close)

    async def _end(self, method: str, instance_id: str) -> Any:
        return _plain(await _call(getattr(self.old, method), *([instance_id] if self._takes_id[method] else [])))

    def named(self, method: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row's kwargs with the interaction's name among them, where the old loops put it.

        Args:
            method: Name of the method that is called; one that takes no name gets none.
            kwargs: The row's kwargs.
        """
        return {"name": self.name, **kwargs} if self._takes_name[method] else dict(kwargs)


def adapted(old: Any) -> AdaptedInteraction:
    """Make an `Interaction` of an object of an old class.

    Raises:
        ConfigError: A method is missing, or cannot be called.
    """
    return AdaptedInteraction(old)


def _takes_id(old: Any, method: str) -> bool:
    """Return whether a method is written with the conversation's id."""
    signature = inspect.signature(getattr(old, method))
    for arguments in (["id"], []):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return bool(arguments)
    raise ConfigError(
        f"{type(old).__name__}.{method}{signature} can be called neither with a conversation's id alone nor with "
        "nothing; give its other parameters a default"
    )


def _takes_name(method: Any) -> bool:
    parameters = inspect.signature(method).parameters
    return "name" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


async def _call(method: Any, /, *arguments: Any, **kwargs: Any) -> Any:
    """Call a method of an old class. One that is not `async`, which `calculate_score` may be, has a thread."""
    if is_coroutine_method(method):
        return await method(*arguments, **kwargs)
    return await Invocation(method, False, arguments, kwargs, task_name("interaction", "", "a method")).whole()


def _read_response(name: str, returned: Any) -> Reply:
    """Read the result of `generate_response`."""
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        raise InteractionContractError(
            f"{name}.generate_response must return (should_terminate, text, score, metrics), got {show(returned)}"
        )
    ends, text, score, metrics = returned
    ends = _plain(ends)
    if not isinstance(ends, Real):  # also a bool
        raise InteractionContractError(
            f"{name}.generate_response: should_terminate, the first value, must be True or False, got {show(ends)}"
        )
    if text is None and ends:
        text = ""
    if not isinstance(metrics, Mapping | None):
        raise InteractionContractError(
            f"{name}.generate_response: metrics, the last value, must be a dict, got {show(metrics)}"
        )
    return Reply(text, reward=_plain(score), done=bool(ends), metrics=dict(metrics or {}))


def _plain(value: Any) -> Any:
    """Return a number that NumPy or torch wraps as Python's; any other value as it is."""
    if isinstance(value, Real) or not callable(getattr(type(value), "item", None)):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError):  # several numbers
        return value
