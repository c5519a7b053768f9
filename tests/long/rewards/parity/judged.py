"""`judge` beside the rule of DeepEyes' released code, divided by 0.8.

The rule is that of `vl_agent.py`, known through its public re-implementations. Both sides call the same judge: a server
here with a table of verdicts.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from tests.long.rewards.parity import Compared
from verl_multiturn.rewards import compute_score

GOLD, QUESTION = "The color of the mug is red.", "What color is the mug?"
REPLIES = {
    "red": "Judgement: 1",
    "The mug is red.": "Judgement: 1",
    "The color of the mug is blue.": "Judgement: 0",
    "red or blue": "Judgement: 0",
    "the color of the mug is red": "Judgement: 0",
    "crimson": "I cannot say.",
    "": "Judgement: 0",
    "A, B": "Judgement: 0",
    "A. B.": "Judgement: 0",
    "B": "Judgement: 1",
    "35": "Judgement: 0",
}
T = "<think>hm</think>"
TAGS, UNASKED, NO_VERDICT = "one pair of answer tags", "the judge is not asked", "no verdict"
# The text of the model, whether a tool was used, and the row of reward-functions.md that states a difference.
CASES: list[tuple[str, bool, str]] = [
    (f"{T}<answer>red</answer>", True, ""),
    (f"{T}<answer>red</answer>", False, ""),
    (f"{T}<answer>The mug is red.</answer>", True, ""),
    (f"{T}<answer>The color of the mug is blue.</answer>", True, ""),
    (f"{T}<answer>The color of the mug is blue.</answer>", False, ""),
    (f"{T}<answer>red or blue</answer>", True, ""),
    ("<think>hm <answer>red</answer>", True, ""),
    (f"{T}<answer>" + "red " * 300 + "</answer>", False, ""),
    (f"{T}The mug is red.", False, TAGS),
    (f"{T}<answer>red or blue</answer><answer>red</answer>", False, TAGS),
    (f"{T}<answer>the color of the mug is red</answer>", False, UNASKED),
    (f"{T}<answer>crimson</answer>", False, NO_VERDICT),
]
# An answer and its gold answer, which SQuAD's normalisation would call equal in all but one case.
ASKED = [("A, B", "B"), ("A. B.", "A"), ("B", "B"), ("35", "3.5")]


@contextlib.contextmanager
def judging(reply: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """Serve a judge on loopback, and give its address.

    Args:
        reply: Returns the judge's reply to a request.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps({"choices": [{"message": {"content": reply(asked)}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            with contextlib.suppress(ConnectionError):  # a question that is not waited for any more
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def _from_table(asked: dict[str, Any]) -> str:
    return REPLIES[json.loads(asked["messages"][1]["content"])["answer"]]


def deepeyes_says(text: str, used_tool: bool) -> float:
    """Compute (0.8 · accuracy + 0.2 · format + 1.2 · tool when right) / 0.8, as DeepEyes does."""
    answered = text.rpartition("</think>")[2]
    wrong_format = text.count("<think>") != text.count("</think>")
    wrong_format |= answered.count("<answer>") != answered.count("</answer>")
    answer = text.rpartition("<answer>")[2].partition("</answer>")[0].strip() if "<answer>" in text else ""
    right = len(answer) < 1000 and "1" in REPLIES[answer]
    wrong_format |= len(answer) >= 1000
    return (0.8 * right - 0.2 * wrong_format + 1.2 * (right and used_tool)) / 0.8


async def compare(quick: bool) -> AsyncIterator[Compared]:
    """Compare every case; `quick` changes nothing."""
    with judging(_from_table) as url:
        options = {"url": url, "model": "judge", "format_weight": 0.25, "tool_use_bonus": 1.5, "attempts": 2}
        asked = [(f"{T}<answer>{answer}</answer>", False, "", gold) for answer, gold in ASKED]
        for text, used_tool, stated, gold in [*((*case, GOLD) for case in CASES), *asked]:
            extra_info = {
                "question": QUESTION,
                "assistant_texts": [text],
                "assistant_calls": [],
                "call_statuses": ["ok"] if used_tool else [],
            }
            found = await compute_score("deepeyes/vstar", text, gold, extra_info, judge=options)
            ours = -9.0 if found["failed"] else found["score"]
            yield Compared("judge", text[:80], ours, deepeyes_says(text, used_tool), stated)
