r"""The output of `verl-multiturn show`, on a terminal.

A model, a tool or a web page may have written any of it. So no control character, no escape sequence, no mark that
turns the direction of writing, and nothing that rich would take for markup reaches the terminal: `clean` writes such
characters as `\x1b` or `\u202e`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_multiturn.describe import printable
from verl_multiturn.records.read.scores import leaves_of
from verl_multiturn.tools.running.results import CallStatus

_LONGEST = 2_000
"""Most characters of a text that are shown; `--json` has all."""
_MOST_GROUPS = 40
_UUID, _ID = re.compile(r"[0-9a-f]{32}"), 12
_PHASES = 3
_METRICS = (
    "critic/score/mean", "critic/advantages/mean", "critic/advantages/min", "critic/advantages/max", "actor/entropy",
    "actor/grad_norm", "actor/pg_loss", "rollout/invalid_share", "rollout/async/age/mean", "timing_s/step",
)  # fmt: skip
_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def clean(text: object, longest: int = _LONGEST) -> str:
    """Return a text that a terminal shows as it is, shortened; line ends and tabs stay."""
    whole = str(text)
    kept = printable(whole[:longest])
    left = len(whole) - longest
    return kept if left <= 0 else f"{kept}… ({left:,} more characters; --json has all)"


def as_json(document: Mapping[str, Any]) -> str:
    """Return a document as one line of JSON in ASCII, which a terminal may get, too; NaN as the text `nan`."""
    return json.dumps(_with_named_numbers(document), allow_nan=False).replace("\x7f", "\\u007f")


def _with_named_numbers(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0.0:  # NaN and infinities
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _with_named_numbers(item) for key, item in value.items()}
    return [_with_named_numbers(item) for item in value] if isinstance(value, list | tuple) else value


def print_document(document: Mapping[str, Any], console: Console) -> None:
    """Print a document of `documents.Shown`."""
    {"run": _run, "step": _step, "group": _group, "conversation": _conversation}[document["kind"]](document, console)
    for fault in document["faults"]:
        _say(console, f"fault: {fault}", "red")


def _say(console: Console, text: object, style: str = "") -> None:
    console.print(Text(clean(text), style=style), soft_wrap=True, highlight=False)


def _table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(title=Text(clean(title), style="italic"), title_justify="left", box=None, header_style="dim")
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(clean(_shown(cell), 300)) for cell in cells))


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _counts(counted: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in counted.items() if value)


def _clock(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _run(document: Mapping[str, Any], console: Console) -> None:
    for run in document["starts"]:
        unknown = ", an evaluation" if run["is_evaluation"] else ", no line says that it ended"
        end = f", ended {_clock(run['ended'])}" if run["ended"] else unknown
        resumed = f", goes on from step {run['resumed_from']}" if run["resumed_from"] else ""
        error = f": {run['error']}" if run["error"] else ""
        _say(console, f"start {run['start']} on {run['host']}, {_clock(run['began'])}{resumed}{end}{error}", "bold")
        _say(console, ", ".join(f"{name} {version}" for name, version in run["versions"].items()), "dim")
    if document["steps"]:
        numbers = ("n", "score", "equal", "tokens", "s")
        columns = ("step", *numbers, "longest phases", "not trained", "left")
        table = _table("steps and validations (n conversations; equal groups; trained tokens)", columns, numbers)
        for line in document["steps"]:
            phases = {name: value for name, value in line["phases"].items() if name not in ("step", "testing")}
            longest = sorted(phases, key=lambda name: -phases[name])[:_PHASES]
            _add(
                table,
                f"{line['step']}{' val' if line['event'] == 'validation' else ''}",
                line["conversations"],
                line["score"],
                f"{line['equal_groups']}/{line['groups']}",
                line["trained_tokens"],
                None if line["began"] is None else f"{line['ended'] - line['began']:.1f}",
                ", ".join(f"{name} {phases[name]:.1f}" for name in longest),
                _counts(line["untrained"]) if line["join"] is not None else "no join",
                _counts({name: line[name] for name in ("evicted", "filtered", "failed", "discarded", "rerolled")}),
            )
        console.print(table)
    _evaluations(document["evaluations"], console)
    for name, counted in document["fates"].items():
        total = sum(counted.values())
        if total:
            _say(console, f"{name}: {total} conversations began: {_counts(counted)}")
    if document["open"]:
        _say(console, f"{document['open']} conversations were running when the workers last looked")
    if document["has_trainer"] and not any(line["start"] for line in document["steps"]):
        _say(console, "steps.jsonl is missing: phases and metrics of steps are not known", "yellow")


def _evaluations(points: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not points:
        return
    numbers = ("score", "from", "to", "rows", "n")
    table = _table("evaluated checkpoints (score with its interval)", ("step", *numbers, "folder", "state"), numbers)
    for point in points:
        said = f"{point['state']}: {point['why']}" if point["why"] else point["state"]
        low, high = point["interval"] or (None, None)
        _add(table, point["step"], point["avg"], low, high, point["rows"], point["samples"], point["folder"], said)
    console.print(table)


def _step(document: Mapping[str, Any], console: Console) -> None:
    for part in document["parts"]:
        _say(console, f"{part['event']} {document['step']}", "bold")
        if "began" in part:
            _say(console, f"from {_clock(part['began'])} on, {part['ended'] - part['began']:.1f} s")
            _say(console, "phases: " + ", ".join(f"{name} {value:.2f} s" for name, value in part["phases"].items()))
            shown = {name: part["metrics"][name] for name in _METRICS if name in part["metrics"]}
            _say(console, "metrics: " + ", ".join(f"{name} {_shown(value)}" for name, value in shown.items()))
            for name in ("evicted", "filtered", "failed", "discarded"):
                if part[name]:
                    _say(console, f"{name}: {', '.join(part[name])}")
            if part["rerolled"]:
                said = ", ".join(f"{old} as {new}" for old, new in part["rerolled"].items())
                _say(console, f"begun anew: {said}")
            if part["join"] is None:
                _say(console, "its join could not be written: what was trained is not known", "yellow")
        _say(
            console,
            f"{part['conversations']} conversations in {part['rows']} rows, score {_shown(part['score'])}, "
            f"{part['trained_tokens']} tokens trained"
            + (f"; rows not trained: {_counts(part['untrained'])}" if part["untrained"] else ""),
        )
        _print_groups(part["groups"], console)
    begun = document["begun"]
    _say(console, f"begun in this step: {begun['count']} conversations: {_counts(begun['fates'])}")


def _print_groups(groups: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not groups:
        return
    roles = sorted({role for group in groups for role in group.get("roles", ())})
    numbers = ("mean", "std", "equal", "scores") if not roles else ("equal", *roles)
    table = _table("groups", ("group", *numbers, "not trained"), ("mean", "std"))
    for group in groups[:_MOST_GROUPS]:
        of_roles = (_scores(group["roles"].get(role, {}).get("scores", ())) for role in roles if "roles" in group)
        plain = (group["mean"], group["std"], group["equal"], _scores(group["scores"]))
        cells = plain if not roles else (group["equal"], *(list(of_roles) or [_scores(group["scores"])]))
        _add(table, group["uid"], *cells, *[""] * (len(numbers) - len(cells)), _counts(group["untrained"]))
    console.print(table)
    if len(groups) > _MOST_GROUPS:
        _say(console, f"and {len(groups) - _MOST_GROUPS} more; --json has all")


def _scores(scores: Sequence[float | None]) -> str:
    return " ".join("–" if score is None else _shown(float(score)) for score in scores)


def _group(document: Mapping[str, Any], console: Console) -> None:
    step = "" if document["step"] is None else f" of step {document['step']}"
    roles = document.get("roles", {})
    said = [f"{role}: {_mean_and_std(each)}" for role, each in roles.items()] or [_mean_and_std(document)]
    _say(console, f"group {document['uid']}{step}: {'; '.join(said)}", "bold")
    of_roles = [f"{role} {what}" for role in roles for what in ("score", "adv")]
    numbers = (*(of_roles or ("score", "adv")), "turns", "calls", "tokens", "s")
    table = _table("conversations", ("nr", "request", *numbers, "stop", "fate", "parts"), ("nr", *numbers))
    for each in document["conversations"]:
        parts = ", ".join(f"{name} {_shown(value)}" for name, value in (each["parts"] or {}).items())
        calls = each["calls"] if not each["failed_calls"] else f"{each['calls']}, {each['failed_calls']} failed"
        found = each.get("roles", {})
        earned = [found.get(role, {}).get(name) for role in roles for name in ("score", "advantage")]
        cells = (*(earned or (each["score"], each["advantage"])), each["turns"], calls, each["sampled_tokens"])
        cells = (*cells, each["seconds"])
        _add(table, each["number"], short_id(each["request_id"]), *cells, each["stop_reason"], _fate(each), parts)
    console.print(table)


def _mean_and_std(said: Mapping[str, Any]) -> str:
    return f"mean {_shown(said['mean']) or 'unknown'}, std {_shown(said['std']) or 'unknown'}"


def short_id(request_id: str) -> str:
    """Return the beginning of a request id, which is enough to name it; one of another form as it is."""
    return request_id[:_ID] if _UUID.fullmatch(request_id) else request_id


def _fate(fate: Mapping[str, Any]) -> str:
    """Return a fate as one expression. Example: `trained partly in step 7: too_old`."""
    what = f"{fate['fate']}{' partly' if fate['partly'] else ''}"
    what += "" if fate["fate_step"] is None else f" in step {fate['fate_step']}"
    what += " (undone by a later start)" if fate["undone"] else ""
    return f"{what}: {fate['why']}" if fate["why"] else what


def _conversation(document: Mapping[str, Any], console: Console) -> None:
    fate, record = document["fate"], document["record"]
    kind = "validation" if fate["validation"] else "training"
    _say(console, f"conversation {document['request_id']}", "bold")
    _say(console, f"group {fate['uid']}, number {fate['number']}, {kind}, begun in step {fate['begun']}: {_fate(fate)}")
    for row in document["joined"]:
        _say(console, _row(row))
    if record is None:
        _say(console, "there is no record of it", "yellow")
        return
    sample = record["sample"]
    _say(console, f"data: {_shown(sample['data_source'])}, row {_shown(sample['index'])}")
    if sample["ground_truth"] is not None:
        _say(console, f"ground truth: {sample['ground_truth']}")
    if sample["interaction"] is not None:
        _say(console, _interaction(record))
    seconds = record["ended"] - record["began"]
    times = ", ".join(f"{name} {record[f'{name}_s']:.2f} s" for name in ("generate", "tools", "interaction"))
    end = f"ended: {record['stop_reason']}{'' if record['valid'] else ', invalid'}"
    end = end if record["status"] == "finished" else f"was {record['status']}"
    _say(console, f"{end}, after {seconds:.2f} s ({times})" + (f"; {record['error']}" if record["error"] else ""))
    # In the messages, a call that could not be read is one of the tool `error` without arguments.
    unread = [call for call in record["calls"] if call["status"] == CallStatus.MALFORMED]
    texts = {call["id"]: call["arguments"] for call in unread if isinstance(call["arguments"], str)}
    for message in record["messages"]:
        _message(message, texts, console)
    _replies(record, console)
    _calls(record, console)


def _row(row: Mapping[str, Any]) -> str:
    advantages = row["advantages"] or []
    parts = ", ".join(f"{name} {_shown(value)}" for name, value in leaves_of(row["parts"] or {}).items())
    role = "" if row["role"] is None else f", role {row['role']}"
    said = [f"row {row['row']}{role}: score {_shown(row['score'])}" + (f" ({parts})" if parts else "")]
    if row["group_mean"] is not None:
        said.append(f"group mean {_shown(row['group_mean'])}, std {_shown(row['group_std']) or 'unknown'}")
    if advantages:
        low, high = min(advantages), max(advantages)
        said.append(f"advantage {_shown(low)}" + ("" if low == high else f" to {_shown(high)}"))
    if not row["validation"]:
        said.append(f"{row['trained']} of {len(advantages)} sampled tokens trained")
    if row["untrained"]:
        said.append(f"not trained: {row['untrained']}")
    return "; ".join(said)


def _message(message: Mapping[str, Any], texts: Mapping[str, str], console: Console) -> None:
    """Print a message of a conversation.

    Args:
        message: The message.
        texts: The model's own text of each call that could not be read, by the call's id.
        console: Console to print on.
    """
    role = str(message.get("role", "?"))
    named = f" {message['name']}" if message.get("name") else ""
    _say(console, f"── {role}{named}", f"bold {_ROLES.get(role, 'blue')}")
    content = message.get("content")
    if isinstance(content, list):  # blocks of text and images
        for block in content:
            text = block.get("text") if isinstance(block, Mapping) else None
            _say(console, text if isinstance(text, str) else json.dumps(block))
    elif content:
        _say(console, content)
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping) and (text := texts.get(str(call.get("id")))) is not None:
            _say(console, f"→ a call that could not be read: {text}", "yellow")
            continue
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        _say(console, f"→ {function.get('name')}({written})", "yellow")


def _interaction(record: Mapping[str, Any]) -> str:
    """Return the name of a conversation's interaction, its kwargs and its score, or its rewards by role."""
    sample = record["sample"]
    kwargs = json.dumps(sample["interaction_kwargs"], ensure_ascii=False)
    scores = ", ".join(f"{role} {_shown(reward)}" for role, reward in record["scores"].items())
    return f"interaction: {sample['interaction']}, kwargs {kwargs}, score {scores or _shown(record['score'])}"


def _replies(record: Mapping[str, Any], console: Console) -> None:
    """Print the replies of the interaction; the whole text of the last one, too, where the model has not read it."""
    if not record["replies"]:
        return
    last = record["replies"][-1]
    ends_it = last["done"] or last["truncated"] or last["turn"] == len(record["generations"]) - 1
    if ends_it and last["text"]:
        _say(console, "── user, not shown to the model", f"bold {_ROLES['user']}")
        _say(console, last["text"])
    table = _table("replies of the interaction", ("turn", "reward", "end", "text"), ("reward",))
    for reply in record["replies"]:
        turn = "opening" if reply["turn"] is None else reply["turn"]
        end = "truncated" if reply["truncated"] else "done" if reply["done"] else ""
        _add(table, turn, reply["reward"], end, clean(reply["text"], 100))
    console.print(table)


def _calls(record: Mapping[str, Any], console: Console) -> None:
    if not record["calls"]:
        return
    table = _table("calls", ("turn", "tool", "status", "reward", "tries", "waited", "ran", "answer"), ("reward", "ran"))
    for call in record["calls"]:
        marks = "".join(f" [{name}]" for name in ("cached", "truncated", "altered") if call[name])
        seconds = f"{call['queue_s']:.2f} s", f"{call['seconds']:.2f} s"
        cells = (call["turn"], call["tool"] or call["name"], call["status"], call["reward"], call["attempts"])
        _add(table, *cells, *seconds, clean(call["text"], 100) + marks)
    console.print(table)
