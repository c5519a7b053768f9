"""A judge of siblings behind an endpoint, which follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request, Response

from tests.serving import serving


class RankingJudge:
    """Ranks conversations by the number behind the word `quality` in them, the highest first.

    Attributes:
        script: Replaces this. `places`: by their places in the question. `unsure`: a sentence without a verdict.
            `away`: status 503. `refuses`: status 400 to a question with conversations. A function: its result for the
            question, which is a ranking, or a whole reply as a text.
        asked: The questions, as JSON objects.
        hangs_until: The reply to a question waits for it, for 30 seconds at most.
    """

    def __init__(self, script: Any = "quality") -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.hangs_until: asyncio.Event | None = None
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.answer)

    async def answer(self, request: Request) -> Response:
        """Return the reply to a request of the endpoint."""
        asked = json.loads((await request.json())["messages"][1]["content"])
        is_ranking = "conversations" in asked
        if self.script == "away" or (self.script == "refuses" and is_ranking):
            return Response("no", status_code=503 if self.script == "away" else 400, headers={"retry-after": "0"})
        if not is_ranking:  # the control, or a question about one alone
            return _reply(self.script(asked) if callable(self.script) else "I am here.")
        self.asked.append(asked)
        if self.hangs_until is not None:
            for _ in range(300):
                if self.hangs_until.is_set():
                    break
                await asyncio.sleep(0.1)
        ranking = list(asked["conversations"])
        if self.script == "unsure":
            return _reply("They are all good.")
        if callable(self.script):
            ranking = self.script(asked)
        elif self.script != "places":
            ranking.sort(key=lambda label: -quality(asked["conversations"][label]))
        if isinstance(ranking, str):
            return _reply(ranking)
        return _reply(json.dumps({"ticket": asked["ticket"], "ranking": ranking}))


def quality(conversation: str) -> float:
    """Return the number behind the word `quality`; 0 without one."""
    found = re.search(r"quality (\d+)", conversation)
    return float(found[1]) if found else 0.0


@contextlib.contextmanager
def ranking(script: Any = "quality", **options: Any) -> Iterator[tuple[RankingJudge, dict[str, Any]]]:
    """Serve a judge; yield it and the options of the reward `rubric`, with `relative`."""
    judge = RankingJudge(script)
    with serving(judge.app) as url:
        yield judge, {"url": f"{url}/v1", "model": "judge", "relative": True, "attempts": 2, **options}


def _reply(text: str) -> Response:
    body = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    return Response(json.dumps(body), media_type="application/json")
