"""Receipts: records of the engine's generations, made before the conversation sees them.

`ReceiptingEngine` lies between a conversation and its engine. It copies each generation, so that no later change to
the lists can reach the copy, and it keeps a digest of the ids that the engine was given. The certificate
(`certificate.check`) compares the receipts with the rows that the trainer is about to use. This module does not know
`Trajectory`.

The digest of the ids is continued from turn to turn. Beyond its own tokens a turn costs one comparison of
pointers with the ids given before (0.1 ms for 65,000 ids).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_multiturn.describe import show
from verl_multiturn.errors import EngineError
from verl_multiturn.rollout.engines.protocol import Ask, Engine, Generation

_HEADER_BYTES = 4
_TOO_MANY = 1 << 31

NOT_TRAINED_ROLE = "not_trained_role"
CAUSES = ("too_old", "invalid", "undelivered", "dropped_row", "not_selected", NOT_TRAINED_ROLE)
"""Causes why a generation is in no row.

`too_old`: its weights are older than may be trained. `invalid`: nothing of it can be trained. `undelivered`: no
client got it, so nothing was built upon it. `dropped_row`: its row was dropped as a whole. `not_selected`: another
answer to the same ids was taken. `not_trained_role`: its role is none of those that are trained.
"""


def prompt_hash() -> hashlib.blake2b:
    """Return an empty digest. Call `update` on it with ids as little-endian int32."""
    return hashlib.blake2b(digest_size=16)


@dataclass(frozen=True, eq=False)
class Receipt:
    """A record of one generation, as the engine returned it. The arrays are read-only."""

    prompt_tokens: int
    """Number of ids that the engine was given."""
    prompt_digest: str
    """Digest (blake2b-128) of those ids, in hexadecimal."""
    max_tokens: int
    """The most tokens that were requested of the engine."""
    ids: NDArray[np.int32]
    """Sampled token ids, `(tokens,)`."""
    logprobs: NDArray[np.float32]
    """Log-probability of each sampled token, `(tokens,)`."""
    versions: NDArray[np.int64]
    """Weight version of each sampled token, `(tokens,)`."""
    role: str | None = None
    """Name of the role that speaks; None where there are no roles."""

    @property
    def digest(self) -> str:
        """Digest (blake2b-128) of the whole receipt, in hexadecimal."""
        head = f"{self.prompt_tokens} {self.prompt_digest} {self.max_tokens}"
        if self.role is not None:
            head += f" role {self.role}"
        made = hashlib.blake2b(head.encode(), digest_size=16)
        for array in (self.ids, self.logprobs, self.versions):
            made.update(f" {len(array)} ".encode() + array.tobytes())
        return made.hexdigest()

    @property
    def is_generation(self) -> bool:
        """Return whether the generation can be trained on.

        The conversation refuses a generation that cannot, so it is in no batch.
        """
        count = len(self.ids)
        aligned = count == len(self.logprobs) == len(self.versions)
        return (
            aligned and 0 < count <= self.max_tokens and bool(np.all(np.isfinite(self.logprobs) & (self.logprobs <= 0)))
        )


class GenerationPlace(NamedTuple):
    """Where a generation of a conversation is."""

    digest: str
    """`Receipt.digest` of the generation."""
    where: int | str
    """Index of the row that it is in; or one of `CAUSES`, why it is in none."""
    role: str | None = None
    """`Receipt.role` of the generation."""


@dataclass(frozen=True, eq=False)
class Receipts:
    """The generations of one batch row, in order, and the facts that all rows of its conversation share.

    `of_rows` makes the receipts of a conversation with several rows.
    """

    request_id: str
    generations: Sequence[Receipt]
    uid: str = ""
    """verl's id of the row's prompt. All rows of a group have the same."""
    session_id: int = 0
    """Number of the conversation within its group."""
    void: bool = False
    """True if the conversation has a void turn, so that the trainer may keep the row out of the loss."""
    invalid: bool = False
    """True if the conversation is invalid, so that nothing of the row is trained."""
    row: int = 0
    """Index of the row within its conversation."""
    places: Sequence[GenerationPlace] | None = None
    """Place of each generation of the whole conversation, in order; None: all of them are in this row, the only one."""
    outages: Sequence[str] = ()
    """Names of the outages that calls of the conversation hit, such as `tool search`. Only a conversation that hit one
    may be excluded because of it."""
    unrewarded: bool = False
    """True if its reward could not be computed, for a cause of ours, so that nothing of the row is trained."""
    teacher: str = ""
    """`teacher_digest` of a teacher's answer about the row; "": there is no teacher."""

    @classmethod
    def of_rows(
        cls,
        request_id: str,
        generations: Sequence[Receipt],
        where: Sequence[int | str],
        uid: str = "",
        session_id: int = 0,
        void: bool = False,
        invalid: bool = False,
        outages: Sequence[str] = (),
    ) -> list[Receipts]:
        """Return the receipts of each row of a conversation.

        Example, of a conversation whose third generation was not delivered:
            of_rows("r", [a, b, c, d], [0, 0, "undelivered", 1])   rows of a, b and of d

        Args:
            request_id: Id of the request.
            generations: All generations of the conversation, in order.
            where: For each generation the index of its row, or the cause why it is in none (`CAUSES`).
            uid: See `Receipts`, as for the rest.
            session_id: See `Receipts`.
            void: See `Receipts`.
            invalid: See `Receipts`.
            outages: See `Receipts`.

        Raises:
            ValueError: A generation has no place, a cause is unknown, or a row has no generation.
        """
        if unknown := [place for place in where if not isinstance(place, int) and place not in CAUSES]:
            raise ValueError(f"{unknown[0]!r} is no cause; expected the index of a row, or one of {list(CAUSES)}")
        rows = {place for place in where if isinstance(place, int)} or {0}
        if len(where) != len(generations) or rows != set(range(len(rows))):
            raise ValueError(
                f"{len(generations)} generations have the places {list(where)!r}; expected one for each, and rows that "
                "are counted from 0 without a gap"
            )
        places = [
            GenerationPlace(generation.digest, place, generation.role)
            for generation, place in zip(generations, where, strict=True)
        ]
        return [
            cls(
                request_id,
                [generation for generation, place in zip(generations, where, strict=True) if place == row],
                uid,
                session_id,
                void,
                invalid,
                row,
                places,
                outages,
            )
            for row in range(len(rows))
        ]

    @property
    def held(self) -> list[GenerationPlace]:
        """Place of each generation in the row, in order."""
        return [GenerationPlace(generation.digest, self.row, generation.role) for generation in self.generations]

    @property
    def ledger(self) -> list[GenerationPlace]:
        """Place of each generation of the whole conversation, in order."""
        return self.held if self.places is None else list(self.places)

    def to_bytes(self) -> bytes:
        """Write the receipts to bytes: the header's length (4 bytes), a JSON header, then the arrays."""
        header = {
            "request_id": self.request_id,
            "uid": self.uid,
            "session_id": self.session_id,
            "void": self.void,
            "invalid": self.invalid,
            "row": self.row,
            "places": self.places,
            "outages": list(self.outages),
            "unrewarded": self.unrewarded,
            "teacher": self.teacher,
            "roles": [g.role for g in self.generations],
            "generations": [
                [g.prompt_tokens, g.prompt_digest, g.max_tokens, len(g.ids), len(g.logprobs), len(g.versions)]
                for g in self.generations
            ],
        }
        encoded = json.dumps(header).encode()
        parts = [len(encoded).to_bytes(_HEADER_BYTES, "little"), encoded]
        for g in self.generations:
            parts += [g.ids.tobytes(), g.logprobs.tobytes(), g.versions.tobytes()]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Receipts:
        """Read the bytes of `to_bytes`.

        Raises:
            ValueError: The bytes are not receipts.
        """
        start = _HEADER_BYTES + int.from_bytes(blob[:_HEADER_BYTES], "little")
        try:
            header = json.loads(blob[_HEADER_BYTES:start])
            generations = []
            listed = header["generations"]
            roles = header.get("roles", [None] * len(listed))  # as the outages below
            if not isinstance(roles, list) or not all(role is None or isinstance(role, str) for role in roles):
                raise ValueError(f"roles is {show(roles, 100)}, expected a list of texts")
            for (prompt_tokens, digest, max_tokens, *counts), role in zip(listed, roles, strict=True):
                arrays = []
                for kind, count in zip(("<i4", "<f4", "<i8"), counts, strict=True):
                    arrays.append(np.frombuffer(blob, kind, count, start))
                    start += arrays[-1].nbytes
                ids, logprobs, versions = arrays
                generations.append(Receipt(prompt_tokens, digest, max_tokens, ids, logprobs, versions, role=role))
            void, invalid = header["void"] is True, header["invalid"] is True
            receipts = cls(
                header["request_id"],
                generations,
                header["uid"],
                header["session_id"],
                void,
                invalid,
                header["row"],
                _places(header["places"]),
                _texts({"outages": [], **header}, "outages"),  # a checkpoint's rows may be of an older version
                header.get("unrewarded") is True,
                _text(header, "teacher"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{len(blob)} bytes that are no receipts: {error}") from error
        if start != len(blob):
            raise ValueError(f"{len(blob)} bytes that are no receipts: they end at {start}")
        return receipts


def _texts(raw: Mapping[str, Any], key: str) -> list[str]:
    values = raw[key]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} is {show(values, 100)}, expected a list of texts")
    return values


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key} is {show(value, 100)}, expected a text")
    return value


def _places(raw: Any) -> list[GenerationPlace] | None:
    if raw is None:
        return None
    places = [GenerationPlace(*each) for each in raw]
    if wrong := [
        place
        for place in places
        if type(place.digest) is not str
        or type(place.where) not in (int, str)
        or not (place.role is None or isinstance(place.role, str))
    ]:
        raise ValueError(f"a place is {show(tuple(wrong[0]), 100)}, expected a digest, a row or a cause, and a role")
    return places


def as_unrewarded(blob: bytes) -> bytes:
    """Return receipts in the form of `Receipts.to_bytes`, marked as those of a row without a computable reward.

    The reward is known after the receipts were written.
    """
    return _marked(blob, unrewarded=True)


def with_teacher(blob: bytes, digest: str) -> bytes:
    """Return receipts in that form, with the digest of a teacher's answer about the row, as of `teacher_digest`."""
    return _marked(blob, teacher=digest)


def teacher_digest(tokens: NDArray[Any], ids: NDArray[Any], logprobs: NDArray[Any]) -> str:
    """Return the digest of a row's tokens, `(S,)`, with a teacher's columns about them, `(S, K)`; in hexadecimal."""
    digest = prompt_hash()
    for column, kind in ((tokens, "<i4"), (ids, "<i4"), (logprobs, "<f4")):
        digest.update(f"{column.shape}".encode() + np.ascontiguousarray(column, kind).tobytes())
    return digest.hexdigest()


def _marked(blob: bytes, **marks: Any) -> bytes:
    """Return receipts with other entries in their header, which alone is written anew."""
    start = _HEADER_BYTES + int.from_bytes(blob[:_HEADER_BYTES], "little")
    encoded = json.dumps({**json.loads(blob[_HEADER_BYTES:start]), **marks}).encode()
    return len(encoded).to_bytes(_HEADER_BYTES, "little") + encoded + blob[start:]


@dataclass
class _OpenRequest:
    """A request that is under way."""

    digest: hashlib.blake2b = field(default_factory=prompt_hash)
    given: list[int] = field(default_factory=list)
    """The ids whose digest is `digest`."""
    receipts: list[Receipt] = field(default_factory=list)


class ReceiptingEngine:
    """An `Engine` that keeps receipts of another engine's generations.

    It remembers a request until `take` is called for it.

    Args:
        engine: Samples the tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, _OpenRequest] = {}

    async def generate(self, ask: Ask) -> Generation:
        """Sample tokens as `Engine.generate` does, and keep a receipt.

        A generation that fails or is cancelled leaves no receipt.

        Raises:
            EngineError: The engine failed, or returned something that is not a generation.
        """
        request = self._open.setdefault(ask.request_id, _OpenRequest())
        prompt_tokens, digest = len(ask.ids), _digest(request, ask.ids)
        generation = await self._engine.generate(ask)
        try:
            receipt = Receipt(
                prompt_tokens,
                digest,
                ask.max_new_tokens,
                _read_only(generation.ids, "<i4"),
                _read_only(generation.logprobs, "<f4"),
                _read_only(generation.versions, "<i8"),
                ask.role,
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"the engine returned what is not a generation: {error}") from error
        if (receipt.ids < 0).any():
            raise EngineError(f"the engine returned what is not a generation: id {receipt.ids.min()} is negative")
        request.receipts.append(receipt)
        return generation

    def take(self, request_id: str) -> list[Receipt]:
        """Return the receipts of a request that is over, in order, and forget them."""
        request = self._open.pop(request_id, None)
        return request.receipts if request is not None else []


def _digest(request: _OpenRequest, ids: Sequence[int]) -> str:
    """Return the digest of all `ids`, continued from the last digest where the ids continue those given before."""
    known = len(request.given)
    # One slice and one comparison of pointers. A sequence that is not a list is hashed anew each time.
    if ids[:known] != request.given:
        request.digest, request.given, known = prompt_hash(), [], 0
    added = list(ids[known:])
    request.digest.update(_read_only(added, "<i4").tobytes())
    request.given += added
    return request.digest.hexdigest()


def _read_only(values: Sequence[Any] | NDArray[Any], kind: str) -> NDArray[Any]:
    """Return a copy of a list of numbers as an array that cannot be written to."""
    with np.errstate(over="ignore"):
        array = np.array(values, dtype=kind)
    if array.ndim != 1:
        raise ValueError(f"expected a list of numbers, got an array of shape {array.shape}")
    array.setflags(write=False)
    return array
