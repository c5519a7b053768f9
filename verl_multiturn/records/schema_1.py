"""Records of schema 1, in the form of schema 2.

Schema 1 wrote a line of plain JSON for each conversation, with all columns and the receipts. It knew neither the row of
the data nor times nor limits: what it did not write is empty here. Whether a conversation belonged to a validation is
guessed from its temperature, and the turns of its calls from the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verl_multiturn.certificate.receipts import Place, Receipt, Receipts
from verl_multiturn.describe import show
from verl_multiturn.errors import CertificateError
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.lines import read_object
from verl_multiturn.records.rows import row_of, version_runs

_COLUMNS = ("prompt_length", "ids", "mask", "logprobs", "versions", "turn_ids", "sources")


def rows_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of a record of schema 1, each with its token columns, `prompt_length` and `receipts`.

    Raises:
        TypeError: The record's entry `rows` is not a list of objects.
    """
    rows = record.get("rows", [record])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"rows is {show(rows, 100)}, expected a list of objects")
    return rows


def lifted(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of schema 1 in the form of schema 2.

    Raises:
        KeyError, TypeError, ValueError: It is no such record.
    """
    rows = rows_of(record)
    known = [Receipts.from_json(row["receipts"]) for row in rows]
    generations = _generations(known)
    session = record.get("session")
    if session is not None:
        for generation, completion in zip(generations, session["completions"], strict=True):
            generation |= {name: completion[name] for name in ("parent", "reward", "text")}
    temperature = record.get("temperature")
    return {
        "schema": 2,
        "request_id": record["request_id"],
        "uid": record.get("uid", ""),
        "number": known[0].session_id if known else 0,
        "validation": temperature is not None and not temperature > 0,
        "step": record.get("step") or 0,
        "loop": "",
        "began": 0.0,
        "ended": 0.0,
        "sample": {},
        "sampling": {} if temperature is None else {"temperature": temperature},
        "stop_reason": record["stop_reason"],
        "valid": record.get("valid", True),
        "void": any(receipts.void for receipts in known),
        "outages": list(known[0].outages) if known else [],
        "rows": [row_of(*(row[name] for name in _COLUMNS)) for row in rows],
        "generations": generations,
        "calls": list(_calls(record)),
        "replies": list(record.get("replies", [])),
        "messages": record.get("messages", []),
        "calc_rewards": record.get("tool_rewards", {}),
        "session": None if session is None else _session(session, record.get("error", "")),
        **{name: record[name] for name in ("score", "differences", "error") if name in record},
        **{name: record[name] for name in ("generate_s", "tools_s", "interaction_s") if name in record},
    }


def _generations(rows: Sequence[Receipts]) -> list[dict[str, Any]]:
    """Return the generations of a conversation, from the receipts of its rows."""
    ledger: list[Place] = rows[0].ledger if rows else []
    each = [iter(receipts.generations) for receipts in rows]
    found = []
    for digest, place in ledger:
        if isinstance(place, str):  # of these, nothing but the digest was written
            found.append({**_EMPTY, "digest": digest, "cause": place})
            continue
        receipt = next(each[place])
        found.append(_placed(receipt, place) if receipt.is_generation else _refused(receipt))
    return found


_EMPTY = {"prompt_tokens": 0, "prompt_digest": "", "max_tokens": 0, "tokens": 0, "finish": ""}


def _placed(receipt: Receipt, row: int) -> dict[str, Any]:
    return {
        "prompt_tokens": receipt.prompt_tokens,
        "prompt_digest": receipt.prompt_digest,
        "max_tokens": receipt.max_tokens,
        "tokens": len(receipt.ids),
        "finish": "",
        "digest": receipt.digest,
        "row": row,
        "start": receipt.prompt_tokens,
    }


def _refused(receipt: Receipt) -> dict[str, Any]:
    """Return a generation that the conversation refused, so that its row does not hold it."""
    tokens = {
        "ids": receipt.ids.tolist(),
        "logprobs": np.asarray(receipt.logprobs, np.float32),
        "versions": version_runs(receipt.versions),
    }
    return {**_placed(receipt, 0), "row": None, "start": None, "cause": "invalid", **tokens}


def _calls(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the calls, with their turn and arguments where the messages have as many."""
    calls = record.get("calls", [])
    turns = [message for message in record.get("messages", []) if message.get("role") == "assistant"]
    asked = [(turn, call) for turn, message in enumerate(turns) for call in message.get("tool_calls") or []]
    known: Sequence[tuple[int, Mapping[str, Any]]] = asked if len(asked) == len(calls) else [(0, {})] * len(calls)
    for call, (turn, written) in zip(calls, known, strict=True):
        function = written.get("function") or {}
        yield {
            "turn": turn,
            "id": written.get("id") or "",
            "name": function.get("name") or call["tool"],
            "arguments": function.get("arguments"),
            **{name: call[name] for name in ("tool", "status", "text")},
            **{name: call[name] for name in ("reward", "metrics", "altered", "seconds") if name in call},
        }


def _session(session: Mapping[str, Any], error: str) -> dict[str, Any]:
    kept = {name: session[name] for name in ("roots", "unenforced", "reward", "by_id") if name in session}
    return {**kept, "end": "stuck" if session.get("stuck") else "", "problem": error}


def in_form_of_2(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of schema 1 in the form of schema 2, as plain JSON.

    Raises:
        CertificateError: It is none.
    """
    try:
        return read_object(line_of(lifted(value)))
    except KeyError as error:
        raise CertificateError(f"no record of a conversation: {error} is missing") from None
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        StopIteration,
        RecursionError,
    ) as error:
        raise CertificateError(f"no record of a conversation: {error}") from None
