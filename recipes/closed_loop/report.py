"""The result of a loop: `python recipes/closed_loop/report.py OUT_DIR`. The last line is one JSON object.

Each learned token is traced to a session, to the weights that sampled it and to the receipt of its generation; and the
reward of each session is compared with the customers' own list. Exit status 1: one of these does not hold.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.closed_loop.customers import Ledger
from recipes.closed_loop.programs import read_state
from verl_multiturn.errors import MultiTurnError
from verl_multiturn.observe.metric_files import read_metrics
from verl_multiturn.records.read.learning import RecordLoader
from verl_multiturn.records.read.sessions import LiveSession, SessionIndex
from verl_multiturn.records.rows import columns
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.records.verify.record import receipts_of

_VIOLATIONS, _CERTIFIED = "rollout/certificate/violations", "rollout/certificate/tokens"


class Trace:
    """Traces learned tokens.

    Args:
        records: The gateway's folder of records.
    """

    def __init__(self, records: Path) -> None:
        index = SessionIndex(records)
        index.refresh()
        self.sessions: Mapping[str, LiveSession] = index.sessions
        self.tokens = 0
        """Learned tokens."""
        self.untraced = 0
        """Number of tokens without session, weights or receipt."""
        self.faults: list[str] = []
        self._loader = RecordLoader()

    def add(self, line: Mapping[str, Any], models: Sequence[str], in_group: bool) -> None:
        """Trace the tokens of a line of `lineage.jsonl`.

        Args:
            line: The line.
            models: Hashes of the weights that the training could learn from.
            in_group: Whether the line is one of a group, with all rows of its conversation; else of a single row.
        """
        self.tokens += line["trained_tokens"]
        try:
            found, fault = self._tokens(line, models, in_group), ""
        except MultiTurnError as error:
            found, fault = 0, str(error)
        if found != line["trained_tokens"]:
            self.untraced += line["trained_tokens"]
            self.faults.append(fault or f"{line['request_id']}: {found} of {line['trained_tokens']} tokens are traced")

    def _tokens(self, line: Mapping[str, Any], models: Sequence[str], in_group: bool) -> int:
        """Return the number of a line's tokens that have a session, known weights and a receipt."""
        session = self.sessions.get(line["request_id"])
        if session is None or session.ended is None or session.task != line["uid"]:
            return 0
        record = self._loader.take({**line, "path": line["file"]})
        digests = {each["digest"] for each in record["generations"]}
        numbers = range(len(record["rows"])) if in_group else [line["index"]]
        count = 0
        for number in numbers:
            row = columns(record["rows"][number])
            learned = [
                (token, record["model"][version])
                for token, is_learned, version in zip(row["ids"], row["mask"], row["versions"], strict=True)
                if is_learned
            ]
            sampled = [
                (int(token), record["model"][int(version)])
                for receipt in receipts_of(record)[number].generations
                if receipt.digest in digests
                for token, version in zip(receipt.ids, receipt.versions, strict=True)
            ]
            known = {model for _, model in learned} <= set(line["models"]) <= set(models)
            count += len(learned) if known and learned == sampled else 0
        return count


def lineage(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a training's `lineage.jsonl`."""
    for line in (folder / "data" / "lineage.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def meant_by(own: Mapping[str, Any]) -> float | None:
    """Return the reward that a customer meant for a session; None: they sent none.

    Args:
        own: The session in their list. One that was cut off before its end has at most the reward that came before it.
    """
    if not own["sent"]:
        return None
    return float(own["right"] if "right" in own else own["sent"][-1]["reward"])


def rewards(ledger: Mapping[str, Mapping[str, Any]], sessions: Mapping[str, LiveSession]) -> dict[str, int]:
    """Compare the rewards of sessions with the customers' list, and return counts.

    `wrong_rewards`: sessions whose reward is another than their customer meant. `late`: reward lines that came to
    another start of the gateway than the session's own. `repeated`: requests that repeat an id. `counted_twice`: lines
    of an id beyond its first.

    Args:
        ledger: The customers' sessions, `customers.Ledger.sessions`.
        sessions: The gateway's.
    """
    found = dict.fromkeys(("rewarded", "late", "repeated", "corrected", "counted_twice", "wrong_rewards"), 0)
    for name, own in ledger.items():
        session = sessions.get(name)
        lines = [] if session is None else session.rewards
        meant = meant_by(own)
        found["rewarded"] += meant is not None
        found["wrong_rewards"] += session is None or session.reward != meant
        found["late"] += sum(line.file != (session.file if session else "") for line in lines)
        found["repeated"] += sum(not each["expected"] for each in own["sent"])
        found["corrected"] += bool(own["sent"]) and own["way"] == "corrected"
        ids = [(line.generation, line.id) for line in lines if line.id is not None]
        found["counted_twice"] += len(ids) - len(set(ids))
    return found


def report(out: Path) -> dict[str, Any]:
    """Return the results of the loop in a folder.

    Args:
        out: Folder of the run.
    """
    folder = out / "loop"
    state = read_state(folder / "state.json")
    rounds = sum(name.startswith("deployed-") for name in state)
    hashes = [state[f"model-{number}"]["hash"] for number in range(rounds + 1)]
    ledger, trace = Ledger(folder / "ledger.jsonl").sessions(), Trace(folder / "records")
    violations = certified = wrong = 0
    for number in range(1, rounds + 1):
        training = folder / "trainings" / str(number)
        in_group = state[f"learned-{number}"]["kind"] == "rl"
        allowed = hashes[:number][-1 - state["about"]["loop"]["staleness"] :]
        for line in lineage(training):
            trace.add(line, allowed, in_group)
            wrong += line["reward"] != meant_by(ledger[line["request_id"]])
        data = [entry["data"] for entry in read_metrics(training)]
        violations += int(sum(each.get(_VIOLATIONS) or 0 for each in data))
        certified += int(sum(each.get(_CERTIFIED) or 0 for each in data))
    verified = 0
    for path, place, each, problem, *_ in verify_files([folder / "records"]):
        verified += each is not None
        violations += 1 if each is None else len(each.violations)
        trace.faults += [] if each is not None else [f"{path}:{place}: {problem}"]
    for fault in trace.faults[:5]:
        print(fault, file=sys.stderr)
    seconds = [
        round(sum(entry["seconds"] for name, entry in state.items() if name.endswith(f"-{number}")))
        for number in range(1, rounds + 1)
    ]
    return {
        "recipe": "closed_loop",
        "seed": state["about"]["seed"],
        "rounds": rounds,
        "accuracy_before": state["accuracy-0"]["accuracy"],
        "accuracy_after": state[f"accuracy-{rounds}"]["accuracy"],
        "accuracies": {name[9:]: entry["accuracy"] for name, entry in state.items() if name.startswith("accuracy-")},
        "held_out": state["accuracy-0"]["rows"],
        "models": hashes,
        "sessions": sum("right" in each for each in ledger.values()),
        "records": verified,
        "starts": state["starts"],
        "learned_tokens": trace.tokens,
        "untraced": trace.untraced,
        "certified_tokens": certified,
        "violations": violations,
        "learned_wrong_rewards": wrong,
        **rewards(ledger, trace.sessions),
        "round_seconds": seconds,
    }


def main() -> None:
    """Print the table and the object."""
    out = Path(sys.argv[1])
    found = report(out)
    table = Table(title="closed_loop", show_header=False)
    for name, value in found.items():
        table.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    Console().print(table)
    print(json.dumps(found))
    zero = ("untraced", "violations", "learned_wrong_rewards", "counted_twice", "wrong_rewards")
    raise SystemExit(1 if any(found[name] for name in zero) else 0)


if __name__ == "__main__":
    main()
