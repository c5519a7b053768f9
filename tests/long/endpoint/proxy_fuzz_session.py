"""A session of `benchmarks.proxy_fuzz` that was found wrong, written to a file: requests, answers, generations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.long.endpoint.proxy_fuzz_agents import Done, Fuzzed
from tests.long.endpoint.proxy_fuzz_model import Log
from verl_multiturn.proxy.sessions.nodes import CompletionNode
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun

MOST_FILES = 5


def written(
    command: str,
    played: Fuzzed,
    log: Log,
    nodes: Mapping[int, CompletionNode],
    numbers: Mapping[int, int | None],
    run: ProxyRun,
    found: Sequence[str],
) -> Path:
    """Write a session to a file in the folder for temporary files, and return its path.

    Args:
        command: Plays it again.
        played: The session and its clients.
        log: The engine's log.
        nodes: Its completions, by the numbers of their generations.
        numbers: Numbers of the generations that clients got, by the identity of their answers.
        run: Parts that it ran with.
        found: Its findings.
    """

    def request(done: Done) -> dict[str, object]:
        known = done.plan.continues, done.plan.rewrites
        return {
            "began": round(done.began, 4),
            "ended": round(done.ended, 4),
            "path": done.ask.path,
            "body": json.loads(done.ask.body()),
            "plan": {
                name: each and {"number": numbers.get(id(each.received)), "id": each.received.id}
                for name, each in zip(("continues", "rewrites"), known, strict=True)
            }
            | {"appended": done.plan.appended, "shown": done.plan.shown},
            "status": done.status,
            "stayed": done.stayed,
            "error": done.error,
            "received": [{"number": numbers.get(id(each)), **vars(each)} for each in done.received],
        }

    def generation(number: int) -> dict[str, object]:
        node = nodes.get(number)
        if node is None:
            return {}
        parent = None if node.parent is None else node.parent.generation.versions[0] // 2
        state = {"id": node.completion.id, "parent": parent, "delivered": node.delivered, "returned": node.returned}
        return {**state, "said": node.said, "conversation": node.prompt.conversation}

    decode = played.family.template.tokenizer.decode
    whole = {
        "again": command,
        "found": found,
        "settings": {
            "limits": repr(run.limits),
            "max_completions": run.max_completions,
            "max_inflight": run.max_inflight,
            "max_rows": run.max_rows,
            "select": getattr(run.select, "__name__", None),
        },
        "requests": [request(done) for done in sorted(played.done, key=lambda done: done.began)],
        "generations": [{**vars(made), "text": decode(made.ids), **generation(made.number)} for made in log.sampled],
    }
    folder = Path(tempfile.mkdtemp(prefix=f"proxy_fuzz-{played.session.id}-"))
    path = folder / "session.json"
    path.write_text(json.dumps(whole, indent=1, default=repr))
    return path
