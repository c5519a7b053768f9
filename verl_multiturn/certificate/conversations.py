"""The check of how rows belong together: the rows of a conversation, and all rows of a batch.

It knows names and receipts only. `certificate.check` compares each single row with its receipts.

In a batch without violations
- no two rows have one name, and no conversation has two names;
- the rows of a conversation are counted from 0 without a gap, and none is missing at the end;
- all rows of a conversation agree on it: its request, whether it is invalid or void, the outages that it hit,
  whether its reward could not be scored, and the place of each of its generations;
- each row that the trainer excludes has a cause (`OUTAGE`, `REWARD_OUTAGE`) that its receipts confirm, and a
  conversation whose reward could not be scored is excluded;
- each generation of a conversation is in exactly the row that it is listed with, in order; or it is listed with a cause
  (`receipts.CAUSES`) and is in no row. A conversation of several rows has a generation in each of them;
- where there are roles, each generation of a conversation has one, each row is of one role, which is trained, and the
  estimator takes the row's turns and its reward for those of that role. A generation is in no row because of its role
  (`not_trained_role`) if, and only if, its client got it and its role is not trained.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from verl_multiturn.certificate.check import Violation
from verl_multiturn.certificate.receipts import CAUSES, NOT_TRAINED_ROLE, GenerationPlace, Receipts
from verl_multiturn.rows.keys import RowKey

_CHOSEN = ("dropped_row", "not_selected")
"""Causes of generations that would be trained if they were chosen."""
OUTAGE, REWARD_OUTAGE = "outage", "reward_outage"
"""Causes for which a trainer leaves out a conversation that had ended well: a call of it hit an outage, or its reward
could not be scored for a cause of ours."""


class MembershipNote(NamedTuple):
    """How a row belongs to its conversation, as in its `Receipts`, without tokens: one process sends it another.

    It has some hundred bytes for each generation.
    """

    request_id: str
    void: bool
    invalid: bool
    outages: Sequence[str]
    unrewarded: bool
    held: Sequence[GenerationPlace]
    ledger: Sequence[GenerationPlace]

    @classmethod
    def of(cls, receipts: Receipts) -> MembershipNote:
        """Return the note of a row's receipts."""
        held = receipts.held
        said = receipts.request_id, receipts.void, receipts.invalid, list(receipts.outages), receipts.unrewarded
        return cls(*said, held, held if receipts.places is None else list(receipts.places))


Membership = Receipts | MembershipNote
"""The parts that link a row to its conversation."""


def repeated(keys: Iterable[RowKey]) -> list[Violation]:
    """Return a violation for each name that several rows of a batch have.

    Args:
        keys: Names of the batch's rows.
    """
    return [
        Violation(f"of row {key}", None, None, f"it is {count} times in the batch")
        for key, count in Counter(keys).items()
        if count > 1
    ]


def gaps(keys: Iterable[RowKey]) -> list[Violation]:
    """Return a violation for each conversation whose rows are not counted from 0 without a gap.

    Args:
        keys: Names of the batch's rows.
    """
    found = []
    for name, own in _by_conversation(keys).items():
        indices = sorted(key.number for key in own)
        if indices != list(range(len(own))):
            what = f"the batch has its rows {indices}, expected {list(range(len(own)))}"
            found.append(Violation(f"of conversation {name}", None, None, what))
    return found


def shared(request_ids: Mapping[RowKey, str]) -> list[Violation]:
    """Return a violation for each request that is in a batch as several conversations.

    Args:
        request_ids: Request id of each row's receipts, by the row's name.
    """
    names: dict[str, list[RowKey]] = defaultdict(list)
    for key, request_id in request_ids.items():
        if not any(key.conversation == other.conversation for other in names[request_id]):
            names[request_id].append(key)
    return [
        Violation(request_id, None, None, f"it is in the batch as {' and as '.join(repr(str(key)) for key in keys)}")
        for request_id, keys in names.items()
        if len(keys) > 1
    ]


def uncaused(receipts: Mapping[RowKey, Membership], left_out: Mapping[str, str]) -> list[Violation]:
    """Return all violations in the trainer's choice of excluded conversations.

    The mask of their rows is checked by `certificate.check`: it is 0 throughout for these, and for no others.

    Args:
        receipts: Receipts, or their notes, of all rows of each conversation that is looked at, by the row's name.
        left_out: The cause for which each conversation was excluded, by its name (`RowKey.conversation`).
    """
    found = []
    for name, keys in _by_conversation(receipts).items():
        row, cause = receipts[keys[0]], left_out.get(name)
        if row.unrewarded and cause != REWARD_OUTAGE:
            what = f"its reward could not be judged, and the cause why it is left out is {cause!r}"
        elif cause == REWARD_OUTAGE and not row.unrewarded:
            what = f"it is left out as {cause!r}, and its reward was judged"
        elif cause == OUTAGE and not row.outages:
            what = f"it is left out as {cause!r}, and none of its calls met one"
        elif cause not in (None, OUTAGE, REWARD_OUTAGE):
            what = f"it is left out as {cause!r}; known causes are {[OUTAGE, REWARD_OUTAGE]}"
        else:
            continue
        found.append(Violation(f"{row.request_id} (rows {name}_*)", None, None, what))
    return found


def misattributed(
    receipts: Mapping[RowKey, Membership], taken: Mapping[RowKey, Collection[str | None]]
) -> list[Violation]:
    """Return a violation for each row that the estimator takes for one of another role, or of none.

    Args:
        receipts: Receipts, or their notes, by the row's name.
        taken: The roles of each row's turns and of its reward, as the estimator of advantages has them. A row that is
            not there is not looked at.
    """
    found = []
    for key, own in receipts.items():
        if key not in taken:
            continue
        held, given = {place.role for place in own.held} or {None}, {*taken[key]} or {None}
        if held != given:
            what = f"it is taken for one of the roles {_named(given)}, by the receipts it is of {_named(held)}"
            found.append(Violation(f"{own.request_id} (row {key})", None, None, what))
    return found


def unjoined(receipts: Mapping[RowKey, Membership], trained: Collection[str] | None = None) -> list[Violation]:
    """Return all violations of how the rows of each conversation belong together.

    Args:
        receipts: Receipts, or their notes, of all rows of each conversation, by the row's name.
        trained: The roles that are trained; None: there are no roles.
    """
    found = []
    for name, keys in _by_conversation(receipts).items():
        rows = [receipts[key] for key in sorted(keys, key=lambda key: key.number)]
        faults = _faults(rows) or _role_faults(rows, trained)
        found += [Violation(f"{rows[0].request_id} (rows {name}_*)", None, None, what) for what in faults]
    return found


def _faults(rows: Sequence[Membership]) -> list[str]:
    """Return the faults in the rows of one conversation, given in order."""
    first, ledger = rows[0], rows[0].ledger
    for name in ("request_id", "invalid", "void", "outages", "unrewarded"):
        said = [getattr(row, name) for row in rows]
        values = {tuple(value) if isinstance(value, list) else value for value in said}
        if len(values) > 1:
            return [f"its rows do not agree on {name}: {sorted(values)}"]
    for index, row in enumerate(rows):
        if row.ledger != ledger:
            return [f"rows 0 and {index} do not agree on the places of its generations"]
    places = {*range(len(rows)), *CAUSES}
    unknown = [each.where for each in ledger if isinstance(each.where, bool) or each.where not in places]
    if unknown:
        return [f"one is listed with {unknown[0]!r}, expected a row below {len(rows)}, or one of {list(CAUSES)}"]
    found = []
    for index, row in enumerate(rows):
        listed = [(place.digest, place.role) for place in ledger if place.where == index]
        held = [(place.digest, place.role) for place in row.held]
        if listed != held:
            found.append(_difference(index, listed, held))
        elif not row.held and len(rows) > 1:
            found.append(f"row {index} of {len(rows)} has no generation of {first.request_id}")
    return found


def _role_faults(rows: Sequence[Membership], trained: Collection[str] | None) -> list[str]:
    """Return the faults in the roles of one conversation, whose rows are given in order, and are right otherwise."""
    ledger = rows[0].ledger
    roles = {place.role for place in ledger}
    if roles <= {None}:  # of an agent loop without roles
        return [f"one is listed with {NOT_TRAINED_ROLE}, and none has a role"] * any(
            place.where == NOT_TRAINED_ROLE for place in ledger
        )
    if trained is None:
        return [f"its generations have the roles {_named(roles)}, and there are no roles"]
    found = []
    if None in roles:
        found.append("a generation has no role, and others have")
    for index in range(len(rows)):
        own = {place.role for place in ledger if place.where == index}
        if len(own) > 1:
            found.append(f"row {index} has generations of the roles {_named(own)}, expected one role")
        elif strange := own - {*trained}:
            found.append(f"row {index} is of the role {_named(strange)}, which is not trained")
    for place in ledger:
        if place.role in trained and place.where == NOT_TRAINED_ROLE:
            found.append(f"one of the role {place.role!r}, which is trained, is listed with {NOT_TRAINED_ROLE}")
        elif place.role not in trained and place.where in _CHOSEN:
            found.append(f"one of the role {place.role!r}, which is not trained, is listed with {place.where}")
    return found


def _named(roles: Collection[str | None]) -> str:
    return ", ".join(sorted(map(repr, roles)))


def _difference(index: int, listed: Sequence[tuple[str, str | None]], held: Sequence[tuple[str, str | None]]) -> str:
    lost, more = Counter(listed) - Counter(held), Counter(held) - Counter(listed)
    if not lost and not more:
        return f"row {index} has its generations in another order than they are listed"
    return (
        f"row {index} lacks {lost.total()} of the {len(listed)} generations that are listed with it, and has "
        f"{more.total()} others"
    )


def _by_conversation(keys: Iterable[RowKey]) -> dict[str, list[RowKey]]:
    groups: dict[str, list[RowKey]] = defaultdict(list)
    for key in keys:
        groups[key.conversation].append(key)
    return groups
