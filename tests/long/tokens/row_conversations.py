"""Honest conversations of several rows, and faults in how their rows belong together.

The conversations are built as windows and overflows build them: each row begins with a prompt rendered anew, and in a
row ids are only appended. Tokens of the engine lie in one of the rows, or are listed with a cause. A seed draws the
numbers of rows and turns, all ids, and omissions.

A fault gets the rows of a conversation, those of another conversation and a random generator. It changes the rows in
place and returns the text with which the certificate has to name the place; or None where the conversation has no room
for the fault.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tests.support.samples import Sample, changed, rebuilt, sample_of_columns
from verl_multiturn.certificate.check import CertificateRow, Violation, verify
from verl_multiturn.certificate.conversations import gaps, repeated, shared, unjoined
from verl_multiturn.certificate.receipts import (
    CAUSES,
    NOT_TRAINED_ROLE,
    GenerationPlace,
    Receipt,
    ReceiptingEngine,
    Receipts,
)
from verl_multiturn.rollout.engines.protocol import Ask, Generation
from verl_multiturn.rollout.trajectory import Source, Trajectory
from verl_multiturn.rows.keys import RowKey

Rows = list[Sample]
Fault = Callable[[Rows, Rows, random.Random], str | None]
Find = Callable[[Rows], list[Violation]]

VOCABULARY = 5_000
MOST_ROWS = 6
TRAINED, NOT_TRAINED = ("white", "black"), "red"
"""Roles of the conversations that have roles."""
_CHOSEN = ("dropped_row", "not_selected")


class RandomEngine:
    """An engine that samples ids, logprobs and a version by lot.

    Args:
        rng: The random generator.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def generate(self, ask: Ask) -> Generation:
        """Return between one token and `ask.max_new_tokens`."""
        rng, count = self._rng, self._rng.randint(1, ask.max_new_tokens)
        version = rng.randint(0, 3)
        logprobs = [-rng.random() for _ in range(count)]
        return Generation(_ids(rng, count), logprobs, [version] * count, "stop")


def honest(seed: int) -> Rows:
    """Return the rows of one honest conversation, as the trainer gets them.

    Args:
        seed: Seed of the conversation; also its name.
    """
    return asyncio.run(_converse(random.Random(f"rows {seed}"), f"u{seed % 97}", seed))


async def _converse(rng: random.Random, uid: str, session_id: int) -> Rows:
    request_id, engine = f"request {uid} {session_id}", ReceiptingEngine(RandomEngine(rng))
    has_roles = rng.random() < 0.5
    where: list[int | str] = []
    rows: list[Trajectory] = []
    for _ in range(rng.randint(2, MOST_ROWS)):
        dropped = rng.random() < 0.1
        place: int | str = "dropped_row" if dropped else len(rows)
        row, role = Trajectory(), rng.choice(TRAINED) if has_roles else None
        row.append_prompt(_ids(rng, rng.randint(3, 20)))
        for turn in range(rng.randint(1, 3)):
            if turn:
                row.append_context(_ids(rng, rng.randint(1, 8)), Source.OBSERVATION)
            while rng.random() < 0.15:  # an answer that no client got, or that was not taken
                cause = rng.choice(CAUSES if has_roles else [each for each in CAUSES if each != NOT_TRAINED_ROLE])
                await engine.generate(
                    Ask(request_id, row.ids, {}, 8, role=NOT_TRAINED if cause == NOT_TRAINED_ROLE else role)
                )
                where.append(cause)
            made = await engine.generate(Ask(request_id, row.ids, {}, 12, role=role))
            row.append_sampled(made.ids, made.logprobs, made.versions)
            where.append(place)
        if not dropped:
            rows.append(row)
    if len(rows) < 2:
        return await _converse(rng, uid, session_id)
    invalid = rng.random() < 0.1
    each = Receipts.of_rows(request_id, engine.take(request_id), where, uid, session_id, invalid=invalid)
    return [sample_of_columns(_columns(row), row.prompt_length, own) for row, own in zip(rows, each, strict=True)]


def _columns(row: Trajectory) -> dict[str, list[float]]:
    return {name: getattr(row, name) for name in ("ids", "mask", "logprobs", "versions")}


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def violations(rows: Rows) -> list[Violation]:
    """Return the certificate's findings in a batch of these rows, as the trainer calls it."""
    keys = [RowKey.parse(row.row.key or "") for row in rows]
    found = repeated(keys) or gaps(keys)
    if found:
        return found
    for each in rows:
        found += verify(each.row, each.receipts, filtered=each.receipts.invalid)
    receipts = {key: each.receipts for key, each in zip(keys, rows, strict=True)}
    found += shared({key: each.request_id for key, each in receipts.items()})
    return found or unjoined(receipts, TRAINED)


def name_of(rows: Rows) -> str:
    """Return the name of the rows' conversation."""
    receipts = rows[0].receipts
    return f"{receipts.uid}_{receipts.session_id}"


def _called(sample: Sample, index: int, **receipts: object) -> Sample:
    """Return a row under another index of its conversation, in its name and its receipts."""
    own = replace(sample.receipts, row=index, **receipts)  # type: ignore[arg-type]
    return Sample(replace(sample.row, uid=own.uid, key=f"{own.uid}_{own.session_id}_{index}"), own)


def _relisted(rows: Rows, places: list[GenerationPlace]) -> None:
    rows[:] = [Sample(each.row, replace(each.receipts, places=places)) for each in rows]


def _in_rows(rows: Rows) -> list[int]:
    """Return the numbers of the generations that are in a row."""
    return [number for number, place in enumerate(rows[0].receipts.ledger) if isinstance(place.where, int)]


def _with_a_cause(rows: Rows) -> list[int]:
    return [number for number, place in enumerate(rows[0].receipts.ledger) if isinstance(place.where, str)]


def row_missing(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Leave out a row that is not the last."""
    del rows[rng.randrange(len(rows) - 1)]
    return f"of conversation {name_of(rows)}"


def last_row_missing(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Leave out the last row."""
    del rows[-1]
    return f"(rows {name_of(rows)}_*)"


def row_missing_and_the_rest_counted_anew(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Leave out a row, and close the gap in the names and receipts of those after it."""
    del rows[rng.randrange(len(rows))]
    rows[:] = [_called(each, index) for index, each in enumerate(rows)]
    return f"(rows {name_of(rows)}_*)"


def rows_under_each_others_names(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Exchange the names of two rows."""
    first, second = rng.sample(range(len(rows)), 2)
    keys = rows[first].row.key, rows[second].row.key
    rows[first] = replace(rows[first], row=replace(rows[first].row, key=keys[1]))
    rows[second] = replace(rows[second], row=replace(rows[second].row, key=keys[0]))
    return f"(row {keys[1]})"


def rows_exchanged(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Exchange two rows, with the names and the indices in their receipts."""
    first, second = rng.sample(range(len(rows)), 2)
    rows[first], rows[second] = _called(rows[second], first), _called(rows[first], second)
    return f"(rows {name_of(rows)}_*)"


def row_twice(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Add a row a second time, under the next index."""
    rows.append(_called(rng.choice(rows), len(rows)))
    return f"(rows {name_of(rows)}_*)"


def row_in_the_place_of_another(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Put a row in the place of another one too, so that one is trained twice and the other is not."""
    first, second = rng.sample(range(len(rows)), 2)
    rows[first] = _called(rows[second], first)
    return f"(rows {name_of(rows)}_*)"


def row_of_another_conversation(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Put a row of another conversation in the place of one, under its name."""
    index, own = rng.randrange(len(rows)), rows[0].receipts
    rows[index] = _called(rng.choice(other), index, uid=own.uid, session_id=own.session_id, invalid=own.invalid)
    rows[index] = _masked(rows[index]) if own.invalid else _unmasked(rows[index])
    return f"(rows {name_of(rows)}_*)"


def generation_lost(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Cut the last generation of a row off, from its tokens and its receipts."""
    index = rng.randrange(len(rows))
    if len(rows[index].receipts.generations) < 2:
        return None
    rows[index] = _cut(rows[index], rows[index].receipts.generations[:-1])
    return f"(rows {name_of(rows)}_*)"


def row_cut_in_two(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Make two rows of one, each right in itself."""
    index = rng.randrange(len(rows))
    sample = rows[index]
    if len(sample.receipts.generations) < 2:
        return None
    *before, last = sample.receipts.generations
    start, end = last.prompt_tokens - sample.prompt, last.prompt_tokens - sample.prompt + len(last.ids)
    prompt = np.concatenate([sample.row.prompt_ids, sample.row.response_ids[:start]])
    second = _response(sample, prompt, start, end)
    rows[index] = _cut(sample, before)
    rows.append(_called(Sample(second, replace(sample.receipts, generations=[last])), len(rows)))
    return f"(rows {name_of(rows)}_*)"


def trained_generation_listed_with_a_cause(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """List a generation that is in a row with a cause."""
    places, number = rows[0].receipts.ledger, rng.choice(_in_rows(rows))
    places[number] = places[number]._replace(where=rng.choice(CAUSES))
    _relisted(rows, places)
    return f"(rows {name_of(rows)}_*)"


def left_out_generation_listed_with_a_row(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """List a generation that is in no row with one."""
    if not (numbers := _with_a_cause(rows)):
        return None
    places, number = rows[0].receipts.ledger, rng.choice(numbers)
    places[number] = places[number]._replace(where=rng.randrange(len(rows)))
    _relisted(rows, places)
    return f"(rows {name_of(rows)}_*)"


def generation_listed_with_another_row(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """List a generation with another row than the one it is in."""
    places, number = rows[0].receipts.ledger, rng.choice(_in_rows(rows))
    where = places[number].where
    places[number] = places[number]._replace(where=rng.choice([each for each in range(len(rows)) if each != where]))
    _relisted(rows, places)
    return f"(rows {name_of(rows)}_*)"


def generation_not_listed(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Leave a generation that is in a row out of the list."""
    places = rows[0].receipts.ledger
    del places[rng.choice(_in_rows(rows))]
    _relisted(rows, places)
    return f"(rows {name_of(rows)}_*)"


def unknown_cause(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """List a generation that is in no row with a cause that there is not."""
    if not (numbers := _with_a_cause(rows)):
        return None
    places, number = rows[0].receipts.ledger, rng.choice(numbers)
    places[number] = places[number]._replace(where="mislaid")
    _relisted(rows, places)
    return f"(rows {name_of(rows)}_*)"


def _with_role(rows: Rows) -> bool:
    return rows[0].receipts.ledger[0].role is not None


def another_role_in_a_receipt(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Change the role of a generation in the receipts of its row alone."""
    if not _with_role(rows):
        return None
    index = rng.randrange(len(rows))
    own = rows[index].receipts
    made, number = list(own.generations), rng.randrange(len(own.generations))
    role = rng.choice([each for each in (*TRAINED, NOT_TRAINED, None) if each != made[number].role])
    made[number] = replace(made[number], role=role)
    rows[index] = replace(rows[index], receipts=replace(own, generations=made))
    return f"(rows {name_of(rows)}_*)"


def another_role_in_the_list(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Change the role with which a generation that is in a row is listed, in all rows."""
    if not _with_role(rows):
        return None
    places, number = rows[0].receipts.ledger, rng.choice(_in_rows(rows))
    role = rng.choice([each for each in (*TRAINED, NOT_TRAINED, None) if each != places[number].role])
    places[number] = places[number]._replace(role=role)
    _relisted(rows, places)
    return f"(rows {name_of(rows)}_*)"


def row_of_a_role_that_is_not_trained(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Let all generations of a row be of a role that is not trained, in its receipts and in the lists."""
    if not _with_role(rows):
        return None
    index, places = rng.randrange(len(rows)), rows[0].receipts.ledger
    own = rows[index].receipts
    made = [replace(each, role=NOT_TRAINED) for each in own.generations]
    digests = iter([each.digest for each in made])
    places = [GenerationPlace(next(digests), index, NOT_TRAINED) if each.where == index else each for each in places]
    rows[index] = replace(rows[index], receipts=replace(own, generations=made))
    _relisted(rows, places)
    return f"row {index} is of the role 'red', which is not trained"


def cause_of_another_role(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """List a generation of a trained role as not trained for its role, or one of another as not chosen."""
    places = rows[0].receipts.ledger
    numbers = [number for number in _with_a_cause(rows) if _with_role(rows)]
    if not numbers:
        return None
    number = rng.choice(numbers)
    where = NOT_TRAINED_ROLE if places[number].role in TRAINED else rng.choice(_CHOSEN)
    places[number] = places[number]._replace(where=where)
    _relisted(rows, places)
    return f"(rows {name_of(rows)}_*)"


def lists_that_differ(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Leave the last generation out of one row's list."""
    index = rng.randrange(len(rows))
    own = rows[index].receipts
    rows[index] = Sample(rows[index].row, replace(own, places=own.ledger[:-1]))
    return f"(rows {name_of(rows)}_*)"


def invalid_in_one_row_alone(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Let one row alone contradict the others on whether the conversation is invalid."""
    index = rng.randrange(len(rows))
    own = rows[index]
    turned = Sample(own.row, replace(own.receipts, invalid=not own.receipts.invalid))
    rows[index] = _masked(turned) if turned.receipts.invalid else _unmasked(turned)
    return f"(rows {name_of(rows)}_*)"


def one_row_of_an_invalid_conversation_trained(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Mark the conversation as invalid, and mask all its rows but one."""
    kept = rng.randrange(len(rows))
    for index, each in enumerate(rows):
        own = Sample(each.row, replace(each.receipts, invalid=True))
        rows[index] = _unmasked(own) if index == kept else _masked(own)
    return f"(row {rows[kept].row.key})"


def another_id_in_a_later_prompt(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Change an id of the prompt of a row after the first."""
    index = rng.randrange(1, len(rows))
    row = rows[index].row
    at = rng.randrange(len(row.prompt_ids))
    prompt = changed(row.prompt_ids, at, (row.prompt_ids[at] + 1) % VOCABULARY)
    rows[index] = replace(rows[index], row=replace(row, prompt_ids=prompt, input_ids=None))
    return f"(row {row.key}), turn 0, token 0: tokens 0 to"


def row_under_another_conversations_name(rows: Rows, other: Rows, rng: random.Random) -> str | None:
    """Move the last row to a conversation of its own."""
    own = rows[-1].receipts
    rows[-1] = _called(rows[-1], 0, session_id=own.session_id + 1_000_000)
    return f"request {own.request_id}: it is in the batch as"


def _masked(sample: Sample) -> Sample:
    nothing = np.zeros_like(sample.row.mask)
    return replace(sample, row=replace(sample.row, mask=nothing, loss_mask=nothing))


def _unmasked(sample: Sample) -> Sample:
    mask = np.zeros_like(sample.row.mask)
    for start, end in sample.spans:
        mask[start:end] = 1
    return replace(sample, row=replace(sample.row, mask=mask, loss_mask=mask))


def _cut(sample: Sample, generations: Sequence[Receipt]) -> Sample:
    """Return the row as it would be if it ended after these generations."""
    last = generations[-1]
    end = last.prompt_tokens - sample.prompt + len(last.ids)
    row = _response(sample, sample.row.prompt_ids, 0, end, generations)
    return Sample(row, replace(sample.receipts, generations=generations))


def _response(
    sample: Sample, prompt: np.ndarray, start: int, end: int, generations: Sequence[Receipt] | None = None
) -> CertificateRow:
    row = sample.row
    assert row.logprobs is not None
    assert row.versions is not None
    columns = (row.response_ids, row.mask, row.logprobs, row.versions)
    made = rebuilt(prompt, *(column[start:end] for column in columns))
    kept = generations if generations is not None else sample.receipts.generations[-1:]
    known = [int(version) for receipt in kept for version in receipt.versions]
    return replace(made, uid=row.uid, key=row.key, min_version=min(known), max_version=max(known))


CONVERSATION_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        row_missing, last_row_missing, row_missing_and_the_rest_counted_anew, rows_under_each_others_names,
        rows_exchanged, row_twice, row_in_the_place_of_another, row_of_another_conversation, generation_lost,
        row_cut_in_two, trained_generation_listed_with_a_cause, left_out_generation_listed_with_a_row,
        generation_listed_with_another_row, generation_not_listed, unknown_cause, lists_that_differ,
        invalid_in_one_row_alone, one_row_of_an_invalid_conversation_trained, another_id_in_a_later_prompt,
        row_under_another_conversations_name, another_role_in_a_receipt, another_role_in_the_list,
        row_of_a_role_that_is_not_trained, cause_of_another_role,
    )
}  # fmt: skip


def trials(name: str, conversations: list[Rows], most: int, find: Find = violations) -> tuple[int, int]:
    """Put a fault into conversations.

    Args:
        name: Key of `CONVERSATION_FAULTS`; also the seed.
        conversations: Honest conversations of several rows.
        most: Number of conversations that it is put into at most.
        find: Finds the errors in the rows of a batch.

    Returns:
        The number of faulty conversations, and the number of those in which the certificate named the right place.
    """
    rng = random.Random(name)
    put = caught = 0
    for rows in rng.sample(conversations, len(conversations)):
        other = rng.choice([each for each in conversations if each is not rows])
        faulty = list(rows)
        place = CONVERSATION_FAULTS[name](faulty, other, rng)
        if place is None:
            continue
        put += 1
        caught += any(place in str(violation) for violation in find(faulty))
        if put == most:
            break
    return put, caught
