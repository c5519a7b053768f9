"""Users in the box: the scripted one, the roles and stop words of simulated ones, and the policy as the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from verl_multiturn.errors import ConfigError, EngineError
from verl_multiturn.interactions.base import Reply
from verl_multiturn.interactions.errors import EnvironmentFailedError
from verl_multiturn.interactions.policy_user import PolicyUser
from verl_multiturn.interactions.scripted_user import ScriptedUser
from verl_multiturn.interactions.simulated_user import flipped, without_stop_words

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A flight to Rome, please."}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "When?"}]


def test_a_scripted_user_says_all_its_turns_and_leaves() -> None:
    user = ScriptedUser({})
    assert user.start("a", turns=("Two.", "Three."), opening="One.") == Reply(text="One.")
    assert user.start("b", turns=[]) is None
    said = [user.reply("a", ANSWERED, turns=["Two.", "Three."]) for _ in range(3)]
    assert said == [Reply(text="Two."), Reply(text="Three."), Reply(done=True)]
    assert user.reply("b", ANSWERED) == Reply(done=True)
    assert user.score("a") == 0.0
    for name in ("a", "b", "b"):
        user.close(name)
    with pytest.raises(KeyError):
        user.reply("a", ANSWERED)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"turns": None}, "expected a list of texts as 'turns', got None"),
        ({"turns": "Two."}, "expected a list of texts as 'turns', got 'Two.'"),
        ({"turns": ["Two.", 3]}, r"got \['Two.', 3\]"),
        ({"turns": [" "]}, "expected a list of texts"),
        ({"turns": ["Two."], "opening": 1}, "expected a text as 'opening', got 1"),
    ],
)
def test_a_script_that_cannot_be_said(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScriptedUser({}).start("a", **kwargs)


def test_a_scripted_user_takes_no_config() -> None:
    with pytest.raises(ConfigError, match="turns are in the row"):
        ScriptedUser({"turns": ["Two."]})


def test_roles_are_flipped() -> None:
    messages = [
        *ASKED,
        {"role": "assistant", "content": "<think>Search.</think>Let me look.", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "3 flights", "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "text", "text": "When?"}, {"type": "image"}]},
    ]
    assert flipped(messages, "You are Ann.") == [
        {"role": "system", "content": "You are Ann."},
        {"role": "user", "content": "(The conversation begins.)"},
        {"role": "assistant", "content": "A flight to Rome, please."},
        {"role": "user", "content": "Let me look.\n\nWhen?"},
    ]


def test_an_assistant_that_only_thinks_says_nothing() -> None:
    for content in ("<think>Hm.", "Hm.</think>", "", None):
        assert flipped([*ASKED, {"role": "assistant", "content": content}], "p")[-1] == {
            "role": "user",
            "content": "(The assistant says nothing.)",
        }


def test_stop_words_are_taken_out() -> None:
    assert without_stop_words("Thanks! STOP", ["STOP"]) == (True, "Thanks!")
    assert without_stop_words("Thanks! STSTOPOP bye", ["STOP", "bye"]) == (True, "Thanks!")
    assert without_stop_words(" Thanks! ", ["STOP"]) == (False, "Thanks!")
    assert without_stop_words("STOP", []) == (False, "STOP")


class Policy:
    """A model that writes these texts, one for each call, and records its requests."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)
        self.asked: list[tuple[Any, int, dict[str, Any]]] = []

    async def write(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, sampling: Mapping[str, Any]) -> str:
        self.asked.append((list(messages), max_tokens, dict(sampling)))
        if self._texts[0] == "broken":
            raise EngineError("it is gone")
        return self._texts.pop(0)


async def test_the_policy_plays_the_user() -> None:
    user = PolicyUser({"persona": "You are Ann.", "max_user_turns": 3, "max_tokens": 7, "temperature": 0.5})
    policy = user.policy = Policy("<think>On Monday?</think> On Monday.", "", "Bye. ###STOP###")
    assert await user.start("a", persona="You want the cheapest.") is None
    assert await user.reply("a", ANSWERED) == Reply(text="On Monday.")
    assert await user.reply("a", ANSWERED) == Reply(text="Bye.", done=True)
    messages, max_tokens, sampling = policy.asked[0]
    assert (max_tokens, sampling) == (7, {"temperature": 0.5})
    assert messages[0]["role"] == "system"
    assert messages[0]["content"].endswith("write ###STOP###.\n\nYou are Ann.\n\nYou want the cheapest.")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert len(policy.asked) == 3  # the empty turn was sampled again
    await user.close("a")


async def test_the_last_message_of_the_user_is_answered_too() -> None:
    user = PolicyUser({"persona": "You are Ann.", "max_user_turns": 2})
    user.policy = Policy("One.", "Two.", "Three.")
    await user.start("a")
    said = [await user.reply("a", ANSWERED) for _ in range(3)]
    assert said == [Reply(text="One."), Reply(text="Two."), Reply(done=True, truncated=True)]


async def test_a_policy_that_cannot_play_the_user() -> None:
    user = PolicyUser({"persona": "You are Ann.", "attempts": 2})
    await user.start("a")
    with pytest.raises(ConfigError, match="needs the engine of a run"):
        await user.reply("a", ANSWERED)
    user.policy = Policy("", "<think>")
    with pytest.raises(EnvironmentFailedError, match="wrote no message as the user, in 2 attempts of 512 tokens"):
        await user.reply("a", ANSWERED)
    user.policy = Policy("broken")
    with pytest.raises(EngineError):
        await user.reply("a", ANSWERED)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"person": "x"}, "PolicyUser: config.person: unknown setting; did you mean 'persona'"),
        ({"max_user_turns": 0}, "max_user_turns: Input should be greater than 0, got 0"),
        ({"stop_words": [""]}, r"stop_words: expected words, got \[''\]"),
        ({"stop_words": "STOP"}, "stop_words: Input should be a valid list, got 'STOP'"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_settings_of_a_simulated_user(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyUser(config)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "there is no persona"),
        ({"persona": " "}, "there is no persona"),
        ({"persona": 3}, "expected a text as 'persona', got 3"),
    ],
)
async def test_a_row_without_a_persona(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await PolicyUser({}).start("a", **kwargs)
