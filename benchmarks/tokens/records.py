"""Cost of records, and losses by a kill: size, the event loop's time, 50 kills, files of one name.

- Records of 8,400 tokens, half of them sampled, in the form and with the writer of a run; beside them the join of their
  rows, as a trainer without a reference model writes it. The texts are passages of this project's pages.
- The event loop hands over each record: its cost is measured as the thread's own CPU time.
- A child writes small and large records and reports those that it has handed over. It is killed at a random moment, 50
  times.
- Eight processes that believe to have one host name and one process id write into one folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from tests.support.sample_records import sample_record
from verl_multiturn.certificate.receipts import Receipt, prompt_hash
from verl_multiturn.records.read.joins import JoinedRow, name_of, table_of, write
from verl_multiturn.records.read.members import read_members
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.rows import row_of
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.records.write.records import RecordWriter

ROOT = Path(__file__).parents[2]
PROCESSES = 8
TURNS, SAMPLED, BETWEEN, PROMPT = 4, 1050, 950, 400
TOKENS = PROMPT + TURNS * (SAMPLED + BETWEEN)
VOCABULARY = 150_000
HANDED_S = 2.0
"""A record handed over so long before a kill must not be lost."""
_AT_ONCE = 2


class Words:
    """Passages of this project's pages, drawn at random; each word has a token id of its own."""

    def __init__(self, seed: int) -> None:
        text = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
        self._words = re.findall(r"\w+|[^\w\s]", text)
        self.draw = np.random.default_rng(seed)
        known = sorted(set(self._words))
        ids = self.draw.choice(VOCABULARY, len(known), replace=False).tolist()
        self._ids = dict(zip(known, ids, strict=True))

    def some(self, count: int) -> tuple[list[int], str]:
        """Return token ids, and their text."""
        start = int(self.draw.integers(len(self._words) - count))
        found = self._words[start : start + count]
        return [self._ids[word] for word in found], " ".join(found)

    def logprobs(self, count: int) -> NDArray[np.float32]:
        """Return log-probabilities as an engine's: most near 0, some far below.

        Near 0 they have the steps of a float32 sum beside 1, since a softmax in float32 has them.
        """
        return rounded(self.draw.gamma(0.3, 1.5, count))


def rounded(surprise: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return log-probabilities as a softmax in float32 has them."""
    with np.errstate(over="ignore"):
        found: NDArray[np.float32] = np.minimum(-np.log(np.exp(surprise).astype(np.float32)), 0)
    return found


class Conversation:
    """A conversation of 8,400 tokens that ended: its columns as lists, its texts, its receipts."""

    def __init__(self, words: Words, number: int, prompt: tuple[list[int], str]) -> None:
        self.number = number
        self.ids = list(prompt[0])
        self.mask, self.logprobs, self.versions = [0] * PROMPT, [0.0] * PROMPT, [-1] * PROMPT
        self.turn_ids, self.sources = [0] * PROMPT, [0] * PROMPT
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": prompt[1]}]
        self.calls: list[dict[str, Any]] = []
        self.receipts: list[Receipt] = []
        for turn in range(TURNS):
            (ids, said), numbers = words.some(SAMPLED), words.logprobs(SAMPLED).tolist()
            digest = prompt_hash()
            digest.update(np.array(self.ids, "<i4").tobytes())
            arrays = np.array(ids, "<i4"), np.array(numbers, "<f4"), np.full(SAMPLED, 7, "<i8")
            self.receipts.append(Receipt(len(self.ids), digest.hexdigest(), 2048, *arrays))
            seen, answer = words.some(BETWEEN)
            self.ids += ids + seen
            self.mask += [1] * SAMPLED + [0] * BETWEEN
            self.logprobs += numbers + [0.0] * BETWEEN
            self.versions += [7] * SAMPLED + [-1] * BETWEEN
            self.turn_ids += [turn] * SAMPLED + [turn + 1] * BETWEEN
            self.sources += [1] * SAMPLED + [3] * BETWEEN
            self.messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": answer}]
            self.calls.append({**sample_record()["calls"][0], "turn": turn, "text": answer})

    def record(self) -> dict[str, Any]:
        """Return its record, as it is made in the writer's thread."""
        columns = (self.ids, self.mask, self.logprobs, self.versions, self.turn_ids, self.sources)
        generations = [
            {
                **sample_record()["generations"][0],
                "prompt_tokens": receipt.prompt_tokens,
                "prompt_digest": receipt.prompt_digest,
                "max_tokens": receipt.max_tokens,
                "tokens": len(receipt.ids),
                "digest": receipt.digest,
                "start": receipt.prompt_tokens,
            }
            for receipt in self.receipts
        ]
        return sample_record(
            **{"request_id": f"r{self.number}", "uid": f"g{self.number // 8}", "number": self.number % 8},
            **{"rows": [row_of(PROMPT, *columns)], "generations": generations, "calls": self.calls},
            **{"messages": self.messages},
        )


def sizes(count: int, seed: int) -> dict[str, Any]:
    """Return the size of records and their join on disk, and the loop's cost for each record."""
    words = Words(seed)
    prompts = [words.some(PROMPT) for _ in range(-(-count // 8))]
    conversations = [Conversation(words, number, prompts[number // 8]) for number in range(count)]
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        writer = RecordWriter(folder, "start")
        paid = []
        for conversation in conversations:
            number = conversation.number
            line = {"request_id": f"r{number}", "uid": f"g{number // 8}", "number": number % 8, "step": 1}
            before = time.thread_time()
            writer.begin(line)
            writer.keep(conversation.record, line)
            writer.scored({**line, "score": 1.0})
            paid.append(time.thread_time() - before)
            time.sleep(0.02)  # conversations of a worker do not end in one instant
        began = time.thread_time()
        writer.close()
        closing = time.thread_time() - began
        while sum(line["event"] == "end" for line in Records(folder).lines()) < count:
            time.sleep(0.1)  # on a busy machine `close` has not waited for all
        kept = sum(path.stat().st_size for path in folder.iterdir())
        name = name_of(False, 1, "start")
        write(folder, name, table_of([joined(words, conversation) for conversation in conversations]))
        join = (folder / "join" / name).stat().st_size
        verdicts = [verdict.verified for verdict in verify_files([folder])]
    assert len(verdicts) == count
    assert all(verified is not None and not verified.violations for verified in verdicts)
    return {
        "records": count,
        "tokens": TOKENS,
        "record_bytes_per_token": round(kept / (count * TOKENS), 2),
        "join_bytes_per_token": round(join / (count * TOKENS), 2),
        "bytes_per_token": round((kept + join) / (count * TOKENS), 2),
        "loop_ms_p50": round(statistics.median(paid) * 1e3, 3),
        "loop_ms_p95": round(statistics.quantiles(paid, n=20)[-1] * 1e3, 3),
        "close_ms": round(closing * 1e3, 3),
    }


def joined(words: Words, conversation: Conversation) -> JoinedRow:
    """Return the trainer's data on a conversation's row: one advantage, its own logprobs, the entropy."""
    own = [number for number, source in zip(conversation.logprobs, conversation.sources, strict=True) if source == 1]
    return JoinedRow(
        request_id=f"r{conversation.number}",
        uid=f"g{conversation.number // 8}",
        number=conversation.number % 8,
        row=0,
        validation=False,
        step=1,
        update=0,
        score=1.0,
        parts='{"acc": 1.0}',
        advantages=np.full(len(own), words.draw.normal(), np.float32),
        old_log_probs=rounded(np.maximum(-np.array(own) * words.draw.normal(1, 1e-3, len(own)), 0)),
        entropy=words.draw.gamma(0.5, 1.0, len(own)).astype(np.float32),
        trained=len(own),
    )


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Do something in a fork, which is given a pipe's end to write to; return its process id and the other end."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            work(theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    return child, ours


def hand_over(folder: Path, conversations: list[Conversation], told: int) -> None:
    """Hand over small records, and now and then one of 8,400 tokens, until the process is killed; report each."""
    writer = RecordWriter(folder, "start")
    for number in range(1_000_000):
        line = {"request_id": f"r{number}", "uid": f"g{number}", "step": 1}
        writer.begin(line)
        conversation = conversations[number % len(conversations)] if number % 20 == 0 else None

        def make(number: int = number, conversation: Conversation | None = conversation) -> dict[str, Any]:
            record = sample_record() if conversation is None else conversation.record()
            return {**record, "request_id": f"r{number}", "uid": f"g{number}"}

        writer.keep(make, line)
        os.write(told, f"{number} {time.monotonic()}\n".encode())
        time.sleep(0.01)


def kills(count: int, seed: int) -> dict[str, Any]:
    """Kill writing processes, and count lost records and torn members."""
    rng, words = random.Random(seed), Words(seed)
    conversations = [Conversation(words, number, words.some(PROMPT)) for number in range(8)]
    lost = torn = handed = unread = 0
    for first in range(0, count, _AT_ONCE):
        running = []
        for _ in range(first, min(first + _AT_ONCE, count)):
            folder = Path(tempfile.mkdtemp(prefix="records-"))
            child, told = in_child(lambda told, folder=folder: hand_over(folder, conversations, told))  # type: ignore[misc]
            running.append((child, told, folder, time.monotonic() + rng.uniform(2.2, 5.0)))
        for child, told, folder, until in sorted(running, key=lambda each: each[3]):
            time.sleep(max(0.0, until - time.monotonic()))
            killed = time.monotonic()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(told) as pipe:
                said = [line.split() for line in pipe.read().splitlines()]
            early = {f"r{number}" for number, at in said if float(at) < killed - HANDED_S}
            found = {record["request_id"] for record in Records(folder).records()}
            members = [member for path in folder.glob("*.jsonl.gz") for member in read_members(path)]
            cut = sum(member.lines is None for member in members)
            handed, lost, torn = handed + len(early), lost + len(early - found), max(torn, cut)
            unread += len(said) - len(found)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    return {
        "kills": count,
        "handed_over_2_s_before": handed,
        "lost_of_them": lost,
        "torn_members_most": torn,
        "lost_of_the_last_2_s": unread - lost,
    }


def one_name() -> dict[str, Any]:
    """Let processes of one host name and one process id write, and return how many files there are."""
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)

        def work(told: int) -> None:
            with mock.patch("socket.gethostname", return_value="host"), mock.patch("os.getpid", return_value=1):
                writer = RecordWriter(folder, "start")
                for number in range(100):
                    name = f"{os.urandom(8).hex()}-{number}"  # a reader takes a request of one id once
                    writer.keep(partial(sample_record, request_id=name), {"request_id": name, "uid": "g"})
                writer.close()

        children = [in_child(work) for _ in range(PROCESSES)]
        for child, told in children:
            os.waitpid(child, 0)
            os.close(told)
        files = list(folder.glob("*.jsonl.gz"))
        records = sum(1 for _ in Records(folder).records())
    assert all(path.name.startswith("start-host-1-") for path in files)
    return {"processes": PROCESSES, "files": len(files), "records_of_them": records}


def main() -> None:
    """Measure, and print the figures as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200, help="number of records whose size is measured")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = one_name() | kills(args.kills, args.seed) | sizes(args.records, args.seed)
    for key, value in found.items():
        print(f"{key.replace('_', ' ')}: {value}")
    failed = [
        *(["bytes_per_token"] if found["bytes_per_token"] > 9 else []),
        *(["loop_ms_p95"] if found["loop_ms_p95"] > 1 else []),
        *(["lost_of_them"] if found["lost_of_them"] else []),
        *(["torn_members_most"] if found["torn_members_most"] > 1 else []),
        *(["files"] if (found["files"], found["records_of_them"]) != (PROCESSES, 100 * PROCESSES) else []),
    ]
    print(json.dumps({**found, "failed": failed}))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
