"""Write the pages of `docs/reference` that follow the code: settings, commands, the API and benchmarks by name.

    python -m scripts.reference

A page keeps its text before and behind its two marks; tests/unit/project/test_reference.py compares the rest. The
pages of refusals and records have writers of their own, beside their tables.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import griffe

from verl_multiturn import config

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference"
BEGIN = "<!-- Written by scripts/reference.py. -->"
END = "<!-- End of what is written. -->"

SETTINGS = {
    "How long may a conversation take, and how much may it hold?": (
        ["tool_timeout_s", "request_timeout_s", "turn_length", "observation_length", "user_turn_length"],
        ["max_tool_calls", "max_malformed_turns", "turns_reminder", "tir"],
        "[Sizing](../train/sizing.md#lengths), [Text mode](text-mode.md#an-answer-that-ends-with-its-box)",
    ),
    "Who answers the model?": (
        ["interaction_config_path", "train", "proxy"],
        [],
        "[Simulated users and environments](../write/interactions.md), "
        "[agents behind an endpoint](../write/proxy.md), [Harbor's tasks](../write/harbor.md), "
        "[environments of verifiers](../write/hub.md)",
    ),
    "Which rewards make the score?": (
        ["tool_reward", "interaction_reward", "near_rewards", "otc"],
        [],
        "[From rewards to a score](scores.md), [Rewards](../write/rewards.md)",
    ),
    "Which part of a conversation is the model shown, and how do its rows learn?": (
        ["context", "advantage", "ratio_level", "void_turn_pattern", "reference_reset"],
        [],
        "[Simulated users and environments](../write/interactions.md), [Ratios of turns](policy-losses.md), "
        "[What is trained](../understand/training.md), [Resets of the reference](reference-resets.md)",
    ),
    "Which groups are trained?": (["filter"], [], "[Groups without signal](../train/filters.md)"),
    "How old may a trained token be?": (
        ["max_staleness", "staleness_strategy", "importance_weight"],
        [],
        "[Asynchronous training](../train/async.md), [Importance weights](../train/decoupled.md)",
    ),
    "What happens when a service is down?": (["outage"], [], "[What is trained](../understand/training.md)"),
    "How do engine and trainer save work?": (
        ["cache", "old_log_prob_bound", "prefix_tree"],
        [],
        "[The engine's cache](../train/cache.md), [old log-probs](../train/cache.md#old-log-probs-from-the-engine), "
        "[Prefix trees](../train/prefix_trees.md)",
    ),
    "What is kept of a run?": (
        ["record_dir", "record_share", "record_max_gb", "record_redact", "checkpoint_evaluation"],
        [],
        "[Records](../train/records.md), [checkpoint evaluations](../train/checkpoint_evaluation.md)",
    ),
    "What is checked, and when does a run end?": (
        ["certificate_share", "silent_settings", "derived"],
        [],
        "[The certificate](../understand/certificate.md), [Settings](../train/settings.md)",
    ),
}
"""Settings of this package by the question of a user, each with the guides that explain them."""

API = {
    "Tools": [
        *(
            "BaseTool",
            "ToolResponse",
            "ToolSchema",
            "tool",
            "verl_multiturn.tools.loading.functions.FromRow",
            "load_tools",
        ),
        *(
            "verl_multiturn.calls.limits.CallLimits",
            "verl_multiturn.tools.loading.call_limits.ToolLimits",
            "verl_multiturn.calls.limits.OutageLimits",
        ),
    ],
    "Simulated users and environments": [
        *("Interaction", "Reply", "load_interactions"),
        *(
            "verl_multiturn.interactions.scripted_user.ScriptedUser",
            "verl_multiturn.interactions.simulated_user.UserSettings",
            "verl_multiturn.interactions.llm_user.LlmUserSettings",
            "verl_multiturn.interactions.policy_user.PolicyUserSettings",
        ),
    ],
    "Agents behind an endpoint": [
        "verl_multiturn.proxy.agents.agent.SessionAddress",
        "verl_multiturn.proxy.protocols.requests.Completion",
    ],
    "Trying without a model": [
        "scripted_rollout",
        "verl_multiturn.rollout.scripted_chat.transcript",
        "verl_multiturn.rollout.reward_fields.reward_fields",
        "ScriptedEngine",
    ],
    "A conversation and its outcome": [
        *(
            "Conversation",
            "Request",
            "Outcome",
            "verl_multiturn.rollout.turn.Turn",
            "verl_multiturn.rollout.outcome.ConversationRow",
        ),
        *("Trajectory", "Source", "StopReason", "Limits"),
    ],
    "Engines": ["Engine", "Ask", "Generation"],
    "Errors": ["verl_multiturn.errors"],
    "Rows of a data set": ["verl_multiturn.runs.data"],
    "Rewards": [
        *(
            "verl_multiturn.rewards.router.compute_score",
            "verl_multiturn.rewards.Solution",
            "verl_multiturn.rewards.Score",
            "verl_multiturn.rewards.score.TruthError",
        ),
        *("verl_multiturn.rewards.router.RewardKwargs", "verl_multiturn.rewards.aclose"),
    ],
    "Advantages": ["verl_multiturn.advantages.turns.GroupMember"],
    "Workspaces and verdicts": [
        *(
            "verl_multiturn.workspaces.workspace.WorkspacePool",
            "verl_multiturn.workspaces.settings.WorkspaceSettings",
            "verl_multiturn.workspaces.threads.open_workspace",
        ),
        *("verl_multiturn.verdicts.task.read_task", "verl_multiturn.verdicts.thread_judge.judge_workspace"),
        "verl_multiturn.task_sets.swe.draw.draw_tasks",
    ],
    "Records": ["verl_multiturn.records.read.records.Records", "verl_multiturn.records.rows.columns"],
    "Settings": [
        *(
            "verl_multiturn.config.MultiTurnSettings",
            "verl_multiturn.config.ScoreSettings",
            "verl_multiturn.config.ContextSettings",
            "verl_multiturn.config.OtcSettings",
            "verl_multiturn.config.AdvantageSettings",
            "verl_multiturn.config.ProxySettings",
        ),
    ],
}
"""Public names by subject; those without a dot are imported from the package itself, modules give all their names."""


def pages() -> dict[Path, str]:
    """Return the pages as they should be, by their paths."""
    found = {}
    written = {"settings": _settings, "commands": _commands, "api": _api, "benchmark-protocols": _protocols}
    for name, lines in ((name, lines_of()) for name, lines_of in written.items()):
        path = DOCS / f"{name}.md"
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        found[path] = _formatted(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")
    return found


def _formatted(page: str) -> str:
    """Return a page with its code as `ruff format` leaves it, which the format check asks for."""
    command = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename", str(DOCS / "page.md"), "-"]
    return subprocess.run(command, input=page, capture_output=True, encoding="utf-8", check=True).stdout


def _load(name: str) -> Any:
    return griffe.load(name, search_paths=[str(DOCS.parents[1])], docstring_parser="google")


def _sentence(text: str) -> str:
    """Return the first sentence of a text, in one line."""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", first, maxsplit=1)[0]


def _rest(text: str) -> str:
    """Return a text without its first sentence; its lists stay lists."""
    first, _, others = text.partition("\n\n")
    flat = " ".join(first.split())
    behind = flat[len(_sentence(text)) :].strip()
    return "\n\n".join(part for part in (behind, others.strip()) if part)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# Settings


def _settings() -> Iterator[str]:
    package = _load("verl_multiturn.config")
    named = [name for first, second, _ in SETTINGS.values() for name in (*first, *second)]
    if sorted(named) != sorted(config.MultiTurnSettings.model_fields):
        raise SystemExit(f"SETTINGS: {set(named) ^ set(config.MultiTurnSettings.model_fields)} is not listed once")
    for question, (first, second, guides) in SETTINGS.items():
        yield from ["", f"### {question}", "", f"Guides: {guides}.", ""]
        yield from ["| setting | default | values | meaning |", "|---|---|---|---|"]
        notes = []
        for name in (*first, *second):
            for path, about in _sections(package, "MultiTurnSettings", name):
                notes.append(f"**`{path}`.** {about}")
            for path, attribute, field in _fields(package, "MultiTurnSettings", name):
                text = attribute.docstring.value if attribute.docstring else ""
                shown = _shown(field.default)
                yield f"| `{path}` | {shown} | {_cell(_values(str(attribute.annotation)))} | {_cell(_sentence(text))} |"
                if rest := _rest(text):
                    notes.append(f"**`{path}`.** {rest}")
        for note in notes:
            yield from ["", note.replace("** - ", "**\n\n- ")]


def _fields(package: Any, model: str, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the documented attribute and the field of a setting, of a section those of its settings."""
    attribute, field = package[model][name], getattr(config, model).model_fields[name]
    inner = str(attribute.annotation)
    if inner in package.members and hasattr(getattr(config, inner), "model_fields"):
        for each in getattr(config, inner).model_fields:
            for path, *others in _fields(package, inner, each):
                yield (f"{name}.{path}", *others)
    else:
        yield name, attribute, field


def _sections(package: Any, model: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the docstring of a section of settings, and of those in it."""
    inner = str(package[model][name].annotation)
    if inner in package.members and hasattr(getattr(config, inner), "model_fields"):
        yield name, inspect.cleandoc(getattr(config, inner).__doc__)
        for each in getattr(config, inner).model_fields:
            for path, about in _sections(package, inner, each):
                yield f"{name}.{path}", about


def _shown(value: Any) -> str:
    return "`null`" if value is None else "`[]`" if value == () else f"`{value}`"


_WORDS = {"float": "number", "int": "whole number", "bool": "`True`, `False`", "str": "text", "None": "`null`"}


def _literal(annotation: str) -> str:
    """Return the `Literal[…]` that a name of `config` stands for; any other annotation as it is."""
    alias = getattr(config, annotation, None)
    alias = get_args(alias)[0] if get_origin(alias) is Annotated else alias
    return f"Literal{list(get_args(alias))!r}" if get_origin(alias) is Literal else annotation


def _values(annotation: str) -> str:
    found = []
    for part in map(_literal, annotation.split(" | ")):
        if part.startswith("Literal["):
            found += [f"`{value}`" for value in ast.literal_eval(f"[{part[8:-1]}]")]
        elif part.startswith(("list", "tuple")):
            found.append("list of texts")
        else:
            found.append(_WORDS.get(part, "mapping"))
    return ", ".join(found)


# Commands


def _commands() -> Iterator[str]:
    from verl_multiturn.cli.commands import GROUPS, command_of

    for when, places in GROUPS.items():
        yield from ["", f"## {when}"]
        for name, place in places.items():
            command: Any = command_of(name)
            inner = getattr(command, "commands", {})
            yield from ["", f"### `verl-multiturn {name}`", "", place.help]
            for own, each in ({f" {key}": each for key, each in inner.items()} or {"": command}).items():
                if own:
                    yield from ["", f"#### `verl-multiturn {name}{own}`", "", _sentence(inspect.cleandoc(each.help))]
                if parameters := [one for one in each.params if getattr(one, "help", None)]:
                    yield from ["", "| argument or option | default | meaning |", "|---|---|---|"]
                    yield from map(_parameter, parameters)


def _parameter(parameter: Any) -> str:
    names = [parameter.name.upper()] if parameter.param_type_name == "argument" else parameter.opts
    names = [*names, *parameter.secondary_opts]
    default = parameter.default
    shown = "" if default in (None, False, "", ()) or parameter.param_type_name == "argument" else f"`{default}`"
    return f"| {', '.join(f'`{name}`' for name in names)} | {shown} | {_cell(' '.join(parameter.help.split()))} |"


# API


def _api() -> Iterator[str]:
    package: Any = _load("verl_multiturn")
    for subject, names in API.items():
        yield from ["", f"## {subject}"]
        for name in names:
            found = package[name.removeprefix("verl_multiturn.")]
            found = found.final_target if found.is_alias else found
            if found.is_module:
                members = [m for n, m in found.members.items() if not n.startswith("_") and not m.is_alias]
                for member in members:
                    if (member.is_class or member.is_function) and member.docstring:
                        yield from _object(f"{name}.{member.name}", member)
            else:
                yield from _object(name, found)


def _object(name: str, found: Any) -> Iterator[str]:
    yield from ["", f"### `verl_multiturn.{name.removeprefix('verl_multiturn.')}`", "", "```python"]
    if found.is_function:
        yield from _signature(found)
    else:
        bases = ", ".join(str(base) for base in found.bases)
        yield f"class {found.name}{f'({bases})' if bases else ''}:"
        yield from (f"    {line}" for line in _body(found))
    yield from ["```", ""]
    yield from _docstring(found)
    if found.is_function:
        return
    members = [m for m in _public(found) if m.docstring]
    for title, chosen in (("attribute", [m for m in members if m.is_attribute]),):
        if chosen:
            yield from ["", f"| {title} | meaning |", "|---|---|"]
            yield from (f"| `{m.name}` | {_cell(_sentence(m.docstring.value))} |" for m in chosen)
    for method in (m for m in members if m.is_function):
        yield from ["", f"**`{method.name}`.** " + "\n".join(_docstring(method))]


def _public(found: Any) -> list[Any]:
    hidden = ("model_config", "GONE")
    return [m for n, m in found.members.items() if not n.startswith("_") and n not in hidden and not m.is_alias]


def _body(found: Any) -> Iterator[str]:
    init = found.members.get("__init__")
    if init is not None and init.is_function and len(init.parameters) > 1:
        yield from _signature(init)
    lines = [line for member in _public(found) for line in _member(member)]
    yield from lines if lines or init is not None else ["..."]


def _member(member: Any) -> Iterator[str]:
    if member.is_function:
        yield from _signature(member)
    elif member.annotation is not None:
        value = str(member.value) if member.value is not None else ""
        default = f" = {value}" if value and len(value) < 60 and "\n" not in value else ""
        yield f"{member.name}: {member.annotation}{default}"
    elif member.value is not None and len(str(member.value)) < 60:
        yield f"{member.name} = {member.value}"


def _signature(function: Any) -> Iterator[str]:
    """Yield a function's head, its parameters a line each where it is long."""
    word = "async def" if "async" in function.labels else "def"
    result = f" -> {function.returns}" if function.returns is not None else ""
    parameters, is_keyword, method = [], False, function.parent.is_class
    for number, one in enumerate(function.parameters):
        if number == 0 and method and one.name in ("self", "cls"):
            parameters.append(one.name)
            continue
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(one.kind.value, "")
        if one.kind.value == "keyword-only" and not is_keyword:
            parameters, is_keyword = [*parameters, "*"], True
        is_keyword = is_keyword or stars == "*"
        note = f": {one.annotation}" if one.annotation is not None else ""
        default = "" if stars or one.default is None else f" = {one.default}" if note else f"={one.default}"
        parameters.append(f"{stars}{one.name}{note}{default}")
    for decorator in function.decorators:
        if str(decorator.value) in ("staticmethod", "classmethod", "property"):
            yield f"@{decorator.value}"
    whole = f"{word} {function.name}({', '.join(parameters)}){result}: ..."
    if len(whole) <= 110:
        yield whole
        return
    yield f"{word} {function.name}("
    yield from (f"    {one}," for one in parameters)
    yield f"){result}: ..."


def _docstring(found: Any) -> Iterator[str]:
    """Yield a docstring as Markdown: its text, then a list each of parameters, attributes, results and errors."""
    if found.docstring is None:
        return
    titles = {"parameters": "Parameters", "attributes": "Attributes", "returns": "Returns", "raises": "Raises"}
    for section in found.docstring.parsed:
        kind = section.kind.value
        if kind == "text":
            yield section.value
        elif kind in titles:
            yield from ["", f"{titles[kind]}:", ""]
            for one in section.value:
                name = f"`{one.name}`" if getattr(one, "name", None) else f"`{one.annotation}`"
                name = f"`{one.annotation}`" if kind in ("returns", "raises") else name
                text = " ".join(one.description.split())
                yield f"- {text}" if kind == "returns" else f"- {name}: {text}"
        elif kind in ("examples", "admonition", "yields"):
            yield from ["", str(getattr(section.value, "description", ""))]


# Benchmarks


def _protocols() -> Iterator[str]:
    from verl_multiturn.evaluation.benchmarks.protocol import cells

    for name, line in cells().items():
        yield from ["", f"## {name}", "", "| setting | value | source |", "|---|---|---|"]
        for key, (value, source) in line.items():
            if source:
                shown = "" if value is None else _code(value)
                yield f"| `{key}` | {shown} | {_cell(source)} |"


def _code(value: Any) -> str:
    """Return a cell of a protocol as code: a text as it is, anything else as JSON; `⏎` is the end of a line."""
    if isinstance(value, dict):
        return "<br>".join(f"{key}: {_code(each)}" for key, each in value.items())
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"``` {_cell(text.replace(chr(10), '⏎'))} ```" if "`" in text else f"`{_cell(text.replace(chr(10), '⏎'))}`"


def main() -> None:
    """Write the pages of this checkout."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
