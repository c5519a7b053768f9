"""The rows of a session: paths of its forest, each completion trained in at most one of them.

    forest                           rows (trained completions; the others of a path are context)
    root ─ 0 ─┬─ 1                   row 0: 0 1
              └─ 2 ─ 3               row 1: (0) 2 3
    root ─ 4                         row 2: 4

A row ends with a completion that is trained and that no trained one continues. Rows are in the order of their ends. A
completion is trained if its client got it, `proxy.select` leaves it in, and its role is one of `proxy.train`. A row is
of one role, since a path of the forest is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from verl_multiturn.calls.invocation import Invocation, TimedOutError, is_coroutine_method
from verl_multiturn.calls.loading.dotted_names import resolve
from verl_multiturn.calls.tasks import Alarms
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.processes.zygote import problem_of
from verl_multiturn.proxy.protocols.requests import Completion
from verl_multiturn.proxy.sessions.forest import Forest
from verl_multiturn.proxy.sessions.nodes import CompletionNode, SampledGeneration
from verl_multiturn.proxy.sessions.roles import Roles
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import ConversationRow, Outcome
from verl_multiturn.rollout.trajectory import Source, Trajectory
from verl_multiturn.rollout.turn import Turn

SELECT_S = 30.0
"""Seconds that a `select` function may take for a session."""


Select = Callable[[Sequence[Completion]], Collection[str]]
"""Returns the ids of the completions that are trained."""


def load_select(name: str | None, where: str) -> Select | None:
    """Return the function that selects the trained completions; None without one.

    Args:
        name: Its name, `module:function`.
        where: The setting that errors name.

    Raises:
        ConfigError: There is no such function, or it takes other arguments.
    """
    if name is None:
        return None
    module, colon, function = name.partition(":")
    if not colon:
        raise ConfigError(f"{where}={name!r} is no function; write it as 'package.module:function'")
    found: Select = resolve(f"{module}.{function}", where)
    if not callable(found):
        raise ConfigError(f"{where}={name!r} is {show(found, 100)}, expected a function")
    try:
        signature = inspect.signature(found)
    except ValueError:  # one that is not written in Python
        return found
    try:
        signature.bind([])
    except TypeError as error:
        raise ConfigError(
            f"{where}={name!r} cannot be called with one argument ({error}); write it as f(completions), which "
            "returns the ids of those to train"
        ) from None
    return found


def session_outcome(
    name: str,
    forest: Forest,
    reason: StopReason,
    error: str,
    *,
    prompt_length: int,
    fill_id: int,
    max_rows: int | None,
    chosen: Collection[CompletionNode],
    roles: Roles | None = None,
) -> Outcome:
    """Return the outcome of a session that is over.

    Args:
        name: Its request id.
        forest: Its completions.
        reason: Why it ended.
        error: The error; "" otherwise.
        prompt_length: The most tokens of a prompt.
        fill_id: Token id of the prompt of a session without one.
        max_rows: The most rows; those with most trained tokens are kept. None: all are.
        chosen: The delivered completions that are to be trained, as far as their roles are.
        roles: The roles; None: there are none.
    """
    of_roles = {node for node in chosen if roles is None or roles.trains(node.prompt.role)}
    ends, trained_in = chosen_rows(of_roles, max_rows)
    turns = [_turn(number, entry, chosen, trained_in, roles) for number, entry in enumerate(forest.ledger)]
    rows = [_row(end, index, turns) for index, end in enumerate(ends)]
    for end in ends:
        # The row in which it is trained shows less: which of two branches is first follows from the order of arrival.
        for after, node in enumerate(reversed(end.path)):
            turns[node.number].after = max(turns[node.number].after, after)
    if not rows:
        prompt = next((root.ids for root in forest.roots if root.length), [fill_id])
        empty = Trajectory()
        empty.append_prompt(prompt[-prompt_length:])
        rows = [ConversationRow(empty, [])]
    for row in rows:
        row.trajectory.seal(reason)
    return Outcome(
        name,
        rows,
        [*ends[-1].prompt.conversation, ends[-1].said] if ends else [],
        turns,
        asked=len(ends[-1].prompt.root.messages) if ends else 0,
        user_turns=len({id(node.prompt) for node in forest.delivered if node.parent is not None}),
        error=error,
    )


async def selected(nodes: Sequence[CompletionNode], select: Select) -> set[CompletionNode]:
    """Return the completions that a `select` function leaves in.

    It runs in a thread, so that no other session waits for it.

    Raises:
        ConfigError: It raised, took longer than `SELECT_S`, or returned something else than ids of these completions.
    """
    shown = [
        replace(
            node.completion,
            messages=node.prompt.conversation,
            tools=node.prompt.tools,
            parent=node.parent.completion.id if node.parent is not None else None,
        )
        for node in nodes
    ]
    name = getattr(select, "__qualname__", type(select).__name__)
    where = f"proxy.select={select.__module__}:{name}"
    call = Invocation(select, is_coroutine_method(select), (shown,), {}, "function 'proxy.select'")
    try:
        await call.ended(Alarms(SELECT_S))
        returned: object = call.result()
        ids = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, str) else None
    except TimedOutError:
        raise ConfigError(f"{where} took longer than {SELECT_S:g} s; make it quicker") from None
    except Exception as error:  # it is the user's code
        raise ConfigError(f"{where} raised {problem_of(error)}; correct it") from error
    finally:
        call.stop()
    if ids is None:
        raise ConfigError(f"{where} returned {show(returned)}, expected a list of the ids to train; correct it")
    known = {each.id for each in shown}
    if strange := [each for each in ids if not (isinstance(each, str) and each in known)]:
        raise ConfigError(
            f"{where} returned {show(strange[0])}, which is no completion's id; return the `id` of those to train"
        )
    return {node for node in nodes if node.completion.id in ids}


def chosen_rows(
    trained: Collection[CompletionNode], max_rows: int | None
) -> tuple[list[CompletionNode], dict[CompletionNode, int]]:
    """Return the last completion of each row, and for each trained completion the index of its row.

    A completion is trained in the first row that holds it. Beyond `max_rows` those with most trained tokens stay. A
    completion of a row that is omitted is trained in another that holds it; if there is none, it has no row.

    Args:
        trained: Completions that are to be trained.
        max_rows: The most rows; None: no limit.
    """
    within: set[CompletionNode] = set()
    for node in trained:
        above = node.parent
        while above is not None and above not in within:
            within.add(above)
            above = above.parent
    ends = sorted((node for node in trained if node not in within), key=lambda node: node.number)
    if max_rows is not None and len(ends) > max_rows:
        held = _held(ends, trained)
        tokens = [0] * len(ends)
        for node, index in held.items():
            tokens[index] += len(node.generation.ids)
        kept = sorted(range(len(ends)), key=lambda index: (-tokens[index], index))[:max_rows]
        ends = [ends[index] for index in sorted(kept)]
    return ends, _held(ends, trained)


def _held(ends: Sequence[CompletionNode], trained: Collection[CompletionNode]) -> dict[CompletionNode, int]:
    held: dict[CompletionNode, int] = {}
    for index, end in enumerate(ends):
        for node in end.path:
            if node in trained:
                held.setdefault(node, index)
    return held


def _row(end: CompletionNode, index: int, turns: Sequence[Turn]) -> ConversationRow:
    """Write row `index`, which ends with the completion `end`, and note in `turns` where its tokens are."""
    written = Trajectory()
    written.append_prompt(end.prompt.root.ids)
    for node in end.path:
        if node.parent is not None:
            written.append_context(node.prompt.template, Source.TEMPLATE)
            written.append_context(node.prompt.added, Source.OBSERVATION)
        made, turn = node.generation, turns[node.number]
        if turn.place == index:
            turn.start = written.response_length
            written.append_sampled(made.ids, made.logprobs, made.versions)
            turn.end = written.response_length
        else:
            written.append_context(made.ids, Source.EARLIER)
    return ConversationRow(written, end.prompt.images)


def _turn(
    number: int,
    entry: SampledGeneration,
    chosen: Collection[CompletionNode],
    trained_in: Mapping[CompletionNode, int],
    roles: Roles | None,
) -> Turn:
    """Return the turn of a generation, without the place of its tokens."""
    node = entry.node
    turn = Turn(number, parent=None if entry.parent is None else entry.parent.number, place=entry.cause)
    turn.lane, turn.role = entry.lane.number, entry.role
    turn.given, turn.at, turn.seconds = entry.given, entry.at, entry.seconds
    turn.finish, turn.cached = entry.finish, entry.cached
    if node is None:
        return turn
    if not node.delivered:
        turn.place = "undelivered"
        return turn
    turn.completion = node.completion.id
    if roles is not None and not roles.trains(entry.role):
        turn.place = "not_trained_role"
    else:
        turn.place = trained_in.get(node, "dropped_row") if node in chosen else "not_selected"
    turn.reward, turn.said = node.reward, node.turn
    return turn
