"""Fates: the outcome of every conversation that began. Each has exactly one.

    trained      a step trained it, wholly or partly                                        join of a step
    spared       it was in a step's batch, and would have taught nothing; why               join of a step
    untrained    it was in a step's batch, and nothing of it was trained; why               join of a step
    validated    a validation scored it                                                     join of a validation
    evicted      its group was too old                                                      steps.jsonl
    filtered     its group was excluded by a filter, and another took its place             steps.jsonl
    discarded    its group had finished when enough others had                              steps.jsonl
    failed       its group failed, by a sibling that raised or whose worker died            steps.jsonl
    rerolled     its group was too late, and its prompt was begun anew under another uid    steps.jsonl
    cut          enough siblings had ended                                                  its line
    cancelled    the trainer no longer wanted it                                            its line
    raised       an author's code made a mistake                                            its line
    collected    a gateway's session ended, and has a record                                its sessions line
    dropped      a gateway's session ended, and its record was not kept; why                its sessions line
    lost         its process ended, or its worker died and the group was begun again        other lines
    open         it is running, or waits to be trained                                      nothing says otherwise
    unknown      files that would show it are missing                                       nothing can be known

The most specific source goes first: a join before a line, a line before facts about the group. Of a gateway's session
its own lines go first: no trainer had it, and a session that runs is `lost` once its gateway does not run any more.

Invariants:
- every conversation that has a line, or a row in a join, has one fate, and no other has one;
- a step that was trained again by a later start counts for that start: the earlier one's weights are gone (`undone`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from verl_multiturn.records.read.joins import JoinName
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.sessions import DROPPED, LiveSession
from verl_multiturn.records.schema import SPARED

FATES = (
    "trained", "spared", "untrained", "validated", "evicted", "filtered", "discarded", "failed", "rerolled", "cut",
    "cancelled", "raised", "collected", "dropped", "lost", "open", "unknown",
)  # fmt: skip
UNDONE = "undone"
"""Under this name conversations are counted whose step a later start undid, whatever their fate was."""
COUNTED = (*FATES[:3], UNDONE, *FATES[3:])
"""The names that `count` counts, in its order."""
_GROUPS = ("evicted", "filtered", "discarded", "failed")
"""Fields of a `StepLine` about groups, each with the uids; the first that has a uid counts."""
_COLUMNS = ["request_id", "uid", "number", "row", "validation", "step", "trained", "untrained", "score", "otc_factor"]
_OF_RECORD = ("request_id", "uid", "number", "validation", "step")
_OVER = ("end", "drop", "score")


class Fate(NamedTuple):
    """The outcome of one conversation."""

    request_id: str
    uid: str
    number: int
    validation: bool
    begun: int
    """Step in which it was begun."""
    fate: str
    """One of `FATES`."""
    step: int | None = None
    """Step that trained, excluded or discarded it; of a validation, the step after which it was."""
    why: str = ""
    """Cause, where the fate alone does not show it."""
    partly: bool = False
    """Of `trained`: some of its sampled tokens were not trained."""
    undone: bool = False
    """Of `trained`, `spared` and `untrained`: a later start went on from an earlier step; these weights are gone."""


@dataclass
class _ConversationEvents:
    request_id: str
    uid: str = ""
    number: int = 0
    validation: bool = False
    step: int = 0
    start: str = ""
    at: float = 0.0
    events: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its lines, by event."""
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """Its rows of the join that counts."""
    session: LiveSession | None = None
    """Its lines as a gateway's session; None: it is none."""

    @property
    def is_over(self) -> bool:
        return any(event in self.events for event in _OVER)


@dataclass
class _Start:
    """The data of `steps.jsonl` about one start of the run."""

    first: int | None = None
    """The step before its first one, from whose weights it went on; None: it has trained none."""
    order: int = 0
    ended: bool = False
    groups: dict[str, tuple[str, int]] = field(default_factory=dict)
    """uid → the group's fate, and its step."""
    rerolled: dict[str, tuple[str, int]] = field(default_factory=dict)
    """uid → uid of the group in its place, and the step."""
    validations: set[int] = field(default_factory=set)
    says_steps: bool = False
    """Whether `steps.jsonl` has a line of it."""
    unjoined: list[str] = field(default_factory=list)
    """Steps and validations whose join could not be written."""


def fates(
    lines: Iterable[Mapping[str, Any]],
    steps: Iterable[Mapping[str, Any]] = (),
    joined: Iterable[Mapping[str, Any]] = (),
    runs: Iterable[Mapping[str, Any]] = (),
    *,
    other_starts: Iterable[str] = (),
    has_joins: bool = False,
    sessions: Mapping[str, LiveSession] = MappingProxyType({}),
    held: Collection[str] = (),
) -> list[Fate]:
    """Return the fate of every conversation that began, in the order of their beginnings.

    Args:
        lines: The workers' lines, with `file`, the stem of the file that has the line; it begins with the start.
        steps: The lines of `steps.jsonl` (`StepLine`, `RunEnd`).
        joined: The rows of all joins, with `start`; their lists are not read.
        runs: The runs' files.
        other_starts: Starts that are known of the conversations of other groups.
        has_joins: Whether there are joins of other groups.
        sessions: A gateway's sessions, by request id.
        held: Stems of the files whose gateway runs.
    """
    steps, runs = list(steps), list(runs)
    named = {str(each.get("start", "")) for each in [*steps, *runs]}
    known = _conversations(lines, named)
    _enter_sessions(known, sessions, named)
    starts = _starts(steps, [*other_starts, *(each.start for each in known.values())], runs)
    _join(known, joined, starts)
    groups = {each.uid: int(each.rows[0]["step"]) for each in known.values() if each.rows}
    begun = defaultdict(list)
    for each in known.values():
        begun[each.uid, each.number].append(each)
    found = []
    for each in sorted(known.values(), key=lambda each: (each.at, each.request_id)):
        again = max(begun[each.uid, each.number], key=lambda other: (other.at, other.request_id)) if each.uid else each
        if each.session is not None:
            found.append(_of_session(each, each.session, starts, each.session.file in held))
            continue
        found.append(_fate(each, again, starts, groups, has_joins or bool(groups)))
    return found


def count(found: Iterable[Fate], *, validation: bool | None = None) -> dict[str, int]:
    """Return how many conversations have each fate; fates that none has are omitted.

    Args:
        found: fates.
        validation: Only those of validations, or only the others; None: all.
    """
    counted = Counter(counted_as(each.fate, each.undone) for each in found if validation in (None, each.validation))
    return {name: counted[name] for name in COUNTED if counted[name]}


def counted_as(fate: str, undone: bool) -> str:
    """Return the name under which `count` counts a fate: one that a later start undid is not `trained` any more."""
    return UNDONE if undone else fate


def fates_of(records: Records) -> list[Fate]:
    """Return the fate of every conversation of a run's folders; see `fates`.

    Records without lines, as in a file that somebody unpacked, are of conversations that began and ended.
    """
    scores: dict[str, tuple[float | None, int]] = {}
    lines = chain(_noted(records.lines(), scores), _lines_of_records(records))
    joined = list(_joined_rows(records))
    steps = [*records.steps(), *records.ends()]
    found = fates(lines, steps, joined, records.runs, sessions=records.sessions(), held=records.held())
    records.compare_scores(scores, joined)
    return found


def _noted(lines: Iterable[dict[str, Any]], scores: dict[str, tuple[float | None, int]]) -> Iterator[dict[str, Any]]:
    """Yield lines, and note the score and the number of rows of each conversation."""
    for line in lines:
        if line["event"] in ("end", "score"):
            score, rows = scores.get(line["request_id"], (None, 1))
            rows = line["summary"]["rows"] if line["summary"] is not None else rows
            scores[line["request_id"]] = line["score"] if isinstance(line["score"], float) else score, rows
        yield line


def _lines_of_records(records: Records) -> Iterator[dict[str, Any]]:
    """Yield lines as they would be of records that have none."""
    for file in records.files:
        if not file.has_lines:
            for placed in records.placed(file):
                line = {name: placed.record[name] for name in _OF_RECORD}
                yield {**line, "event": "begin", "at": placed.record["began"], "file": file.stem}
                yield {**line, "event": "end", "at": placed.record["ended"], "file": file.stem}


def _joined_rows(records: Records) -> Iterator[dict[str, Any]]:
    for name, table in records.joins(_COLUMNS):
        for row in table.to_pylist():
            yield {**row, "start": name.start}


def start_of(stem: str, named: Iterable[str]) -> str:
    """Return the start that the stem of a worker's files begins with.

    Args:
        stem: The stem.
        named: Starts that are known.
    """
    return next((name for name in named if name and stem.startswith(f"{name}-")), stem.partition("-")[0])


def _conversations(lines: Iterable[Mapping[str, Any]], named: Iterable[str]) -> dict[str, _ConversationEvents]:
    known: dict[str, _ConversationEvents] = {}
    for line in lines:
        request_id = str(line.get("request_id", ""))
        if not request_id:
            continue
        each = known.setdefault(request_id, _ConversationEvents(request_id))
        each.events[str(line.get("event"))] = line
        each.uid = str(line.get("uid") or each.uid)
        each.number = int(line.get("number") or each.number)
        each.validation = bool(line.get("validation") or each.validation)
        each.step = int(line.get("step") or each.step)
        each.start = start_of(str(line.get("file", "")), named)
        if line.get("event") == "begin" or not each.at:
            each.at = float(line.get("at") or 0.0)
    return known


def _enter_sessions(
    known: dict[str, _ConversationEvents], sessions: Mapping[str, LiveSession], named: Iterable[str]
) -> None:
    """Enter a gateway's sessions, also those that began and have no other line: a kill came before it."""
    for name, session in sessions.items():
        each = known.setdefault(name, _ConversationEvents(name))
        each.session, each.start = session, start_of(session.file, named)
        each.uid, each.number = each.uid or session.task or "", each.number or session.number
        each.at = each.at or session.began


def _of_session(each: _ConversationEvents, session: LiveSession, starts: Mapping[str, _Start], is_held: bool) -> Fate:
    """Return the fate of a gateway's session.

    Args:
        each: The session.
        session: Its lines as a session.
        starts: The known data of the starts.
        is_held: Whether the gateway that wrote its start runs.
    """

    def fate(name: str, why: str = "") -> Fate:
        return Fate(each.request_id, each.uid, each.number, each.validation, each.step, name, None, why)

    if session.is_dropped:
        return fate("dropped", session.why.removeprefix(DROPPED))
    if session.ended is not None:
        return fate("collected")
    for event, name in (("raise", "raised"), ("cancel", "cancelled"), ("drop", "dropped")):
        if (line := each.events.get(event)) is not None:
            return fate(name, str(line.get("why") or ""))
    if "end" in each.events:
        return fate("collected")  # a kill came before its end was noted
    start = starts.get(each.start, _Start())
    later = any(other.order > start.order for other in starts.values())
    if not is_held and (start.ended or later):
        return fate("lost", "it was running at its gateway's end")
    return fate("open", "it is running")


def _starts(
    steps: Sequence[Mapping[str, Any]], named: Iterable[str], runs: Iterable[Mapping[str, Any]]
) -> dict[str, _Start]:
    starts: dict[str, _Start] = {}
    for name in sorted({*named, *(str(each.get("start", "")) for each in [*steps, *runs])}):
        starts[name] = _Start(order=len(starts))  # the names order by time
    for line in steps:
        start, event, step = starts[str(line.get("start", ""))], line.get("event"), int(line.get("step") or 0)
        start.says_steps = True
        if event == "end":
            start.ended = True
        if event not in ("step", "validation"):
            continue
        if event == "validation":
            start.validations.add(step)
        else:
            start.first = step - 1 if start.first is None else min(start.first, step - 1)
        if line.get("join") is None:
            start.unjoined.append(f"{event} {step}")
        for what in _GROUPS:
            for uid in line.get(what) or ():
                start.groups.setdefault(uid, (what, step))
        for old, new in (line.get("rerolled") or {}).items():
            start.rerolled[old] = new, step
    for run in runs:
        start = starts[str(run.get("start", ""))]
        if start.first is None and run.get("resumed_from") is not None:
            start.first = int(run["resumed_from"])
    return starts


def _join(
    known: dict[str, _ConversationEvents], joined: Iterable[Mapping[str, Any]], starts: dict[str, _Start]
) -> None:
    """Enter the rows of joins into the conversations that they are of."""
    rows: dict[str, dict[tuple[int, str, int], list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in joined:
        start = str(row.get("start", ""))
        if start not in starts:
            starts[start] = _Start(order=1 + max((each.order for each in starts.values()), default=-1))
        if request_id := row.get("request_id"):
            rows[str(request_id)][starts[start].order, start, int(row["step"])].append(row)
    for request_id, by_step in rows.items():
        last = max(by_step)  # one that was trained again belongs to the later start
        each = known.get(request_id)
        if each is None:  # its lines are not there
            first = by_step[last][0]
            each = known[request_id] = _ConversationEvents(
                request_id, str(first["uid"]), int(first["number"]), bool(first["validation"]), last[2], last[1]
            )
        each.rows = [{**row, "start": last[1]} for row in by_step[last]]


def _fate(
    each: _ConversationEvents,
    last: _ConversationEvents,
    starts: Mapping[str, _Start],
    joined_groups: Mapping[str, int],
    has_joins: bool,
) -> Fate:
    """Return the fate of a conversation.

    Args:
        each: The conversation.
        last: The one of its name that was begun last.
        starts: The known data of the starts.
        joined_groups: The groups of which a row is in a join, each with the step.
        has_joins: Whether any join is there.
    """

    def fate(name: str, step: int | None = None, why: str = "", **more: bool) -> Fate:
        return Fate(each.request_id, each.uid, each.number, each.validation, each.step, name, step, why, **more)

    if each.rows:
        return _joined(each, starts, fate)
    group, rerolled = _of_group(each, starts, "groups"), _of_group(each, starts, "rerolled")
    if (line := each.events.get("raise")) is not None:
        return fate("raised", group[1] if group else None, str(line.get("why") or ""))
    if (line := each.events.get("cancel")) is not None and line.get("why") == "cut":
        return fate("cut")
    if rerolled is not None:
        return fate("rerolled", rerolled[1], f"begun anew as {rerolled[0]}")
    if line is not None:
        why = str(line.get("why") or "")
        return fate("lost", why="its process was ended") if why == "killed" else fate("cancelled", why=why)
    if last is not each:
        return fate("lost", why=f"its group was begun again as {last.request_id}")
    if group is not None:
        what, step = group
        if what == "failed" and not each.is_over:
            return fate("lost", step, "its worker died, and its group was given up")
        return fate(what, step)
    if (joined := joined_groups.get(each.uid)) is not None:
        if each.is_over:
            return fate("cut", joined, "it ended when enough siblings had")
        return fate("lost", joined, "its group was taken without it, and no line says why")
    return _without_a_trace(each, starts, has_joins, fate)


def _joined(each: _ConversationEvents, starts: Mapping[str, _Start], fate: Any) -> Fate:
    first = each.rows[0]
    step, causes = int(first["step"]), [row.get("untrained") for row in each.rows]
    if "collected" in causes:  # its sessions line is not there, as in an export of the joins
        return fate("collected")  # type: ignore[no-any-return]
    named = next((str(cause) for cause in causes if cause), "")
    if first["validation"]:
        return fate("validated", step, named)  # type: ignore[no-any-return]
    undone = _is_undone(str(first["start"]), step, starts)
    if not any(row.get("trained") for row in each.rows):
        if spared := next((str(cause) for cause in causes if cause in SPARED), None):
            return fate("spared", step, spared, undone=undone)  # type: ignore[no-any-return]
        return fate("untrained", step, named or "unsampled", undone=undone)  # type: ignore[no-any-return]
    # A row without a sampled token has none that could be trained.
    partly = any(cause not in (None, "unsampled", *SPARED) for cause in causes)
    named = next((str(cause) for cause in causes if cause and cause not in SPARED), "") if partly else ""
    return fate("trained", step, named, partly=partly, undone=undone)  # type: ignore[no-any-return]


def _is_undone(start: str, step: int, starts: Mapping[str, _Start]) -> bool:
    order = starts[start].order
    return any(each.order > order and each.first is not None and each.first < step for each in starts.values())


def undone_joins(
    names: Iterable[JoinName], steps: Iterable[Mapping[str, Any]], runs: Iterable[Mapping[str, Any]]
) -> set[JoinName]:
    """Return the joins of training steps from before which a later start went on: their weights are gone.

    Args:
        names: The joins of one folder.
        steps: The lines of `steps.jsonl`.
        runs: The runs' files.
    """
    names = list(names)
    starts = _starts(list(steps), [name.start for name in names], runs)
    return {name for name in names if not name.validation and _is_undone(name.start, name.step, starts)}


def _of_group(each: _ConversationEvents, starts: Mapping[str, _Start], where: str) -> tuple[str, int] | None:
    """Return the fate of the conversation's group by a start: its own, or a later one that took the group over."""
    order = starts[each.start].order if each.start in starts else 0
    for start in sorted(starts.values(), key=lambda start: start.order):
        if start.order >= order and (found := getattr(start, where).get(each.uid)) is not None:
            return found  # type: ignore[no-any-return]
    return None


def _without_a_trace(each: _ConversationEvents, starts: Mapping[str, _Start], has_joins: bool, fate: Any) -> Fate:
    """Return the fate of a conversation that no other source mentions."""
    start = starts.get(each.start, _Start())
    later = any(other.order > start.order for other in starts.values())
    if each.validation and each.step in start.validations:
        if not each.is_over:
            return fate("lost", each.step, "its worker died, and its group was given up")  # type: ignore[no-any-return]
        if f"validation {each.step}" in start.unjoined:
            return fate("validated", each.step)  # type: ignore[no-any-return]
    if each.is_over and (start.unjoined or not (has_joins or start.says_steps)):
        missing = f"the join of {start.unjoined[0]} is not there" if start.unjoined else "no join is there"
        return fate("unknown", why=missing)  # type: ignore[no-any-return]
    if start.ended or later:
        how = "had ended" if each.is_over else "was running"
        over = "the run's end" if start.ended else "its process's end"
        return fate("lost", why=f"it {how} at {over}")  # type: ignore[no-any-return]
    return fate("open", why="it has ended, and waits to be trained" if each.is_over else "it is running")  # type: ignore[no-any-return]
