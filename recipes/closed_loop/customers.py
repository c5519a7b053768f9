"""Customers of a gateway: a program of its own that knows nothing of training.

    python -m recipes.closed_loop.customers ask --url URL --tasks FILE --ledger FILE --round N --samples N
    python -m recipes.closed_loop.customers reward --url URL --ledger FILE --round N

`ask` starts a session for each task and sample, lets an agent work on it, by OpenAI's client or as Anthropic's do, and
ends it. Some rewards come at once. The others come with `reward`, which may be days later: twice, in parts, corrected,
or for the tasks of the round before. The environment variable `GATEWAY_KEY` holds the gateway's admin key.

The ledger is the customers' own list: a line for each session, for its end, and for each reward that was answered. Both
commands go on where they were ended.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from recipes.proxy_quickstart.agent import CALLS, MODEL, TOOLS, TURNS, call_calculator, connect, solve
from recipes.quickstart.task import extract_answer, score_answer

KEY = "GATEWAY_KEY"
AT_ONCE = 16
TRIES = 60
WAYS = ("before the end", "twice", "corrected", "late", "in parts", "disputed")
"""How a customer rewards, by the number of the session in its task."""
LATER = 8
"""Number of tasks of which the last one is rewarded in the round after its own."""


class Reward(NamedTuple):
    """A request that rewards a session."""

    when: str
    """`now`: when the session ends; `late`: by the command `reward`."""
    value: float
    id: str | None
    whole: bool = False
    """Whether the admin rewards the session; else its customer the last completion."""
    status: int = 200
    counted: bool = True


class Ledger:
    """The customers' own list, a file of JSON lines that is appended to.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, threading.Lock()
        path.touch(mode=0o600)
        if (held := path.read_bytes()) and not held.endswith(b"\n"):
            with path.open("ab") as file:  # a line that was cut off costs itself alone
                file.write(b"\n")

    def note(self, **entries: Any) -> None:
        """Append a line."""
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entries) + "\n")

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each session, by its id: the lines of its start and its end, and `sent`."""
        found: dict[str, dict[str, Any]] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            session = found.setdefault(entry["session_id"], {"sent": []})
            if entry["event"] == "sent":
                session["sent"].append(entry)
            else:
                session |= entry
        return found


def rewards_of(way: str, right: float) -> list[Reward]:
    """Return the requests with which a customer rewards a session, in their order. They add up to `right`.

    Args:
        way: One of `WAYS`, or `round after`.
        right: 1.0 for a right answer, else 0.0.
    """
    wrong = 1.0 - right
    return {
        "before the end": [Reward("before", right, None)],
        "twice": [Reward("now", right, "check"), Reward("late", right, "check", counted=False)],
        # Without an id a reward replaces the one before.
        "corrected": [Reward("now", wrong, None), Reward("late", right, None)],
        "late": [Reward("late", right, "mail", True), Reward("late", right, "mail", True, counted=False)],
        "in parts": [
            Reward("now", right / 2, "form"),
            Reward("late", right / 2, "words"),
            Reward("late", right / 2, "form", counted=False),
        ],
        "disputed": [Reward("now", right, "check"), Reward("late", wrong, "check", status=409, counted=False)],
        "round after": [Reward("late", right, "mail"), Reward("late", right, "mail", counted=False)],
    }[way]


def way_of(task: int, slot: int) -> str:
    """Return how a session is rewarded.

    Args:
        task: Number of its task in the round.
        slot: Number of the session in its task.
    """
    return "round after" if task % LATER == LATER - 1 else WAYS[slot % len(WAYS)]


def post(url: str, key: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send a JSON object, and return the status and the object of the answer. An answer 429 or 503 is waited out.

    Raises:
        OSError: Nobody answers.
    """
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    # No proxy of the network: the gateway is at hand.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for left in reversed(range(TRIES)):
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with opener.open(request, timeout=600) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                if refused.code not in (429, 503) or not left:
                    return refused.code, json.load(refused)
                time.sleep(float(refused.headers.get("Retry-After", 1)))
    raise AssertionError


def granted(url: str, key: str, body: Mapping[str, Any], status: int = 200) -> dict[str, Any]:
    """Send a JSON object, and return that of the answer.

    Raises:
        SystemExit: The answer has another status.
    """
    found, answer = post(url, key, body)
    if found != status:
        raise SystemExit(f"{url} answered {found}, expected {status}: {answer}; see the gateway's log")
    return answer


def solve_as_anthropic(base_url: str, key: str, asked: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Let the model call the calculator until it answers, by Anthropic's Messages API.

    Args:
        base_url: Address of the session for clients of Anthropic.
        key: Key of the session.
        asked: The system's message and the customer's.

    Returns:
        Id and text of each answer.
    """
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
             for each in functions]  # fmt: skip
    messages = [dict(message) for message in asked[1:]]
    body = {"model": MODEL, "max_tokens": 128, "system": asked[0]["content"], "tools": tools}
    found = []
    for _ in range(TURNS):
        status, answer = post(f"{base_url.rstrip('/')}/v1/messages", key, {**body, "messages": messages})
        if status == 400:  # the conversation is too long
            break
        if status != 200:
            raise SystemExit(f"{base_url} answered {status}: {answer}; see the gateway's log")
        found.append((answer["id"], "".join(block.get("text", "") for block in answer["content"])))
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        messages.append({"role": "assistant", "content": answer["content"]})
        if not calls:
            break
        results = [call_calculator(json.dumps(call["input"])) for call in calls[:CALLS]]
        results += ["Error: too many calls"] * (len(calls) - CALLS)
        messages.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]})  # fmt: skip
    return found


def answers_of(session: Mapping[str, Any], asked: Sequence[dict[str, Any]], task: int) -> list[tuple[str, str]]:
    """Let an agent work on a task, and return id and text of each of its answers. Every second task is Anthropic's."""
    if task % 2:
        return solve_as_anthropic(session["anthropic_base_url"], session["api_key"], asked)
    with connect(session["base_url"], session["api_key"]) as client:
        completions = solve(client, list(asked))
    return [(each.id, each.choices[0].message.content or "") for each in completions]


class Customers:
    """The customers.

    Args:
        url: Address of the gateway.
        admin: Its admin key.
        ledger: Their list.
        number: Number of the round.
    """

    def __init__(self, url: str, admin: str, ledger: Ledger, number: int) -> None:
        self._url, self._admin, self._ledger, self._round = url.rstrip("/"), admin, ledger, number

    def ask(self, tasks: Sequence[Mapping[str, Any]], samples: int) -> None:
        """Work on tasks, those sessions alone that have not ended.

        Args:
            tasks: The tasks: `task_id`, `messages` and `answer`.
            samples: Sessions of each task.
        """
        over = {(each["task"], each["slot"]) for each in self._ledger.sessions().values() if "right" in each}
        left = [(number, slot) for number in range(len(tasks)) for slot in range(samples)
                if (tasks[number]["task_id"], slot) not in over]  # fmt: skip
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda each: self._session(tasks[each[0]], *each), left):
                pass

    def reward(self) -> None:
        """Send all rewards that are due and were not answered."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda each: self._late(*each), self._ledger.sessions().items()):
                pass

    def _session(self, task: Mapping[str, Any], number: int, slot: int) -> None:
        about = {"task_id": task["task_id"], "user": f"customer-{number}"}
        session = granted(f"{self._url}/rl/start_session", self._admin, about, 201)
        name, key, way = session["session_id"], session["api_key"], way_of(number, slot)
        line = {"session_id": name, "round": self._round, "task": task["task_id"], "slot": slot, "way": way}
        self._ledger.note(event="session", **line, api_key=key)
        answers = answers_of(session, task["messages"], number)
        right = score_answer(extract_answer(answers[-1][1]), task["answer"]) if answers else 0.0
        rewards = rewards_of(way, right) if answers else []
        for reward in rewards:
            if reward.when == "before":
                self._send(name, key, reward, 0, interaction_id=answers[-1][0])
        granted(f"{self._url}/rl/end_session", key, {})
        self._ledger.note(event="end", session_id=name, right=right, answers=len(answers))
        for place, reward in enumerate(rewards):
            if reward.when == "now":
                self._send(name, key, reward, place)

    def _late(self, name: str, session: Mapping[str, Any]) -> None:
        if not session.get("answers") or (session["way"] == "round after" and session["round"] >= self._round):
            return
        answered = {each["place"] for each in session["sent"]}
        for place, reward in enumerate(rewards_of(session["way"], session["right"])):
            if place not in answered:
                self._send(name, session["api_key"], reward, place)

    def _send(self, name: str, key: str, reward: Reward, place: int, **target: str) -> None:
        body: dict[str, Any] = {"reward": reward.value, **({} if reward.id is None else {"id": reward.id}), **target}
        by = (self._admin, {**body, "session_id": name}) if reward.whole else (key, body)
        answer = granted(f"{self._url}/rl/set_reward", *by, reward.status)
        line = {"session_id": name, "place": place, "reward": reward.value, "id": reward.id}
        counted = bool(answer.get("counted"))
        self._ledger.note(event="sent", **line, counted=counted, expected=reward.counted)


def read_tasks(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a file of JSON lines."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def main() -> None:
    """Ask, or reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ask", "reward"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--round", type=int, required=True)
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--samples", type=int, default=1)
    args = parser.parse_args()
    customers = Customers(args.url, os.environ[KEY], Ledger(args.ledger), args.round)
    if args.what == "ask":
        customers.ask(list(read_tasks(args.tasks)), args.samples)
    else:
        customers.reward()


if __name__ == "__main__":
    main()
