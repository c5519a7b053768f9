"""The task of `ask_first`: the sum of two people's things, where half of the users leave one number out; and the user.

Only this module defines how a task is made, worded, answered and scored. The warm start, the rows and the reward use
it.

    user:   Ann has 34 apples. How many apples do Ann and Bob have?
    model:  How many apples does Bob have?
    user:   Bob has 71 apples.
    model:  <tool_call>{"name": "calculator", "arguments": {"expression": "34 + 71"}}</tool_call>
    tool:   105
    model:  Answer: 105
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn import Interaction, Reply

USER = "forgetful"
"""Name of the user in `user.yaml`."""
SYSTEM_PROMPT = "Ask for a number that is missing. End with: Answer: <number>"
NAMES = ("Ann", "Bob", "Eva", "Kim", "Leo", "Max", "Mia")
THINGS = ("apples", "books", "coins", "eggs", "nuts", "pens")
NEEDLESS = -0.5
"""Reward of a turn that asks for a number which the user has given."""
_QUESTION = re.compile(r"How many (\w+) does (\w+) have\?")
_ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")


@dataclass(frozen=True)
class Task:
    """A sum of two people's numbers."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    thing: str
    missing: str
    """Name of the person whose number the user omits; "": none."""

    @property
    def answer(self) -> int:
        """Return the right answer."""
        return sum(self.numbers)

    @property
    def question(self) -> str:
        """Return the user's first message."""
        told = [self.tell(name) for name in self.names if name != self.missing]
        return " ".join([*told, f"How many {self.thing} do {' and '.join(self.names)} have?"])

    def tell(self, name: str) -> str:
        """Return the sentence by which the user gives a person's number."""
        return f"{name} has {self.numbers[self.names.index(name)]} {self.thing}."

    def ask(self, name: str) -> str:
        """Return the question for a person's number."""
        return f"How many {self.thing} does {name} have?"

    def heard(self) -> list[int]:
        """Return the numbers in the order in which a model hears them, the missing one last."""
        by_name = dict(zip(self.names, self.numbers, strict=True))
        return [by_name[name] for name in sorted(self.names, key=lambda name: name == self.missing)]


def make_tasks(size: int, seed: int) -> list[Task]:
    """Make tasks; in every other one a number is missing.

    Args:
        size: Number of tasks.
        seed: Seed of the tasks.
    """
    rng = random.Random(seed)
    tasks = []
    for index in range(size):
        names = tuple(rng.sample(NAMES, 2))
        numbers = tuple(rng.randint(10, 99) for _ in names)
        missing = rng.choice(names) if index % 2 else ""
        tasks.append(Task(names, numbers, rng.choice(THINGS), missing))
    return tasks


def stated_answer(text: str) -> int | None:
    """Return the number after `Answer:` at the end of a turn; None: there is none."""
    found = _ANSWER.search(text)
    return int(found[1]) if found else None


def asked_name(text: str) -> str | None:
    """Return the name of the person whose number a turn asks for; None: it asks for none, or gives an answer."""
    found = _QUESTION.search(text)
    return found[2] if found and stated_answer(text) is None else None


class ForgetfulUser(Interaction):
    """A user who gives the omitted number on request, and reports when it was given before.

    A row's kwargs are the fields of `Task`. An answer ends the conversation, with the reward 1 for the right number.

    Args:
        config: Empty.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._told: dict[str, set[str]] = {}

    def start(self, instance_id: str, **kwargs: Any) -> None:
        """Remember which numbers the row's question gives.

        Args:
            instance_id: Id of the conversation.
            kwargs: Fields of `Task`.
        """
        task = task_of(kwargs)
        self._told[instance_id] = {name for name in task.names if name != task.missing}

    def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        """Answer a question, or judge the answer.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation so far.
            kwargs: Fields of `Task`.
        """
        task, told, text = task_of(kwargs), self._told[instance_id], str(messages[-1]["content"])
        if (answer := stated_answer(text)) is not None:
            return Reply(reward=float(answer == task.answer), done=True)
        name = asked_name(text)
        if name not in task.names:
            return Reply("I do not understand.", reward=NEEDLESS)
        if name in told:
            return Reply(f"I said: {task.tell(name)}", reward=NEEDLESS)
        told.add(name)
        return Reply(task.tell(name))

    def close(self, instance_id: str) -> None:
        """Forget the conversation."""
        self._told.pop(instance_id, None)


def task_of(kwargs: Mapping[str, Any]) -> Task:
    """Return the task that a row's kwargs hold. A row from a Parquet file may have arrays in place of lists."""
    names, numbers = tuple(map(str, kwargs["names"])), tuple(map(int, kwargs["numbers"]))
    return Task(names, numbers, str(kwargs["thing"]), str(kwargs["missing"]))
