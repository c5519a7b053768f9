"""Measure that rows are shown to the model, or refused by name: in every family, role and form.

    python -m benchmarks.rows [FAMILY ...] [--short] [--out FILE]

Each row takes the way of a run (`row_prompts.prompt_of`). The oracle (`row_words`, `row_oracle`) reads the row as its
author wrote it and the prompt as the engine gets it, and shares no code with the product's own check. A row counts as

- `shown`: all its content is in the prompt, once, in order, in turns of its role, and nothing else;
- `refused`: a `ConfigError` that names the row and the message, tool or end of the conversation;
- `lost`: something of it is not in the prompt, or it raised another error, or one without the remedy;
- `silent`: something of it was changed or added, or it had to be refused, and it was accepted;
- `honest_refused`: an author may write such a row, the bare template could show it, and it was refused.

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from rich.console import Console
from rich.table import Table

from tests.long.tokens.row_cases import row_marks, written_cases
from tests.long.tokens.row_oracle import faults
from tests.long.tokens.row_parts import Case
from tests.long.tokens.row_prompts import ROW, could_show, plain_prompt, prompt_of
from tests.long.tokens.row_storage import stored_cases
from tests.long.tokens.row_words import Message, words_of
from tests.support.families import family
from verl_multiturn.errors import ConfigError

VERDICTS = ("shown", "refused", "lost", "silent", "honest_refused")
# Names of the place in a row, beside the row itself.
_NAMED = re.compile(r"message \d|ends in|tool '|tool_|no message|messages|prompt must|'prompt'")


@dataclass(frozen=True)
class Verdict:
    """Result of a case with a family."""

    family: str
    case: Case
    counts_as: str
    """One of `VERDICTS`."""
    why: str = ""


def judge(name: str, case: Case, prompt: str | Exception) -> Verdict:
    """Report the verdict of a case.

    Args:
        name: Name of the family.
        case: The row.
        prompt: The prompt that a run's engine got, or the exception.
    """
    if isinstance(prompt, Exception):
        return _refusal(name, case, prompt)
    if case.refused:
        return Verdict(name, case, "silent", f"accepted: …{prompt[-160:]!r}")
    found = _faults(name, case, prompt)
    if not found:
        return Verdict(name, case, "shown")
    lost = any("is not in the prompt" in fault for fault in found)
    return Verdict(name, case, "lost" if lost else "silent", "; ".join(found)[:700])


def _faults(name: str, case: Case, prompt: str) -> list[str]:
    messages: list[Message] = list(case.messages)
    if case.opening is not None:
        messages.append({"role": "user", "content": case.opening})
    said = words_of(messages, name, "never" if case.columns else "perhaps")
    plain = plain_prompt(name, json.dumps(case.schemas))
    return faults(prompt, name, family(name).format, said, case.schemas, row_marks(messages), plain)


def _refusal(name: str, case: Case, error: Exception) -> Verdict:
    text = f"{type(error).__name__}: {error}"[:500]
    if not isinstance(error, ConfigError):
        return Verdict(name, case, "lost", text)
    if not case.refused and case.honest and could_show(name, case, lambda prompt: not _faults(name, case, prompt)):
        return Verdict(name, case, "honest_refused", text)
    if f"row {ROW}" not in str(error) or not _NAMED.search(str(error)):
        return Verdict(name, case, "lost", f"refused without its name: {text}")
    return Verdict(name, case, "refused", text)


async def _tried(name: str, case: Case) -> Verdict:
    try:
        prompt: str | Exception = await prompt_of(name, case)
    except Exception as error:  # the test looks for errors other than ConfigError
        prompt = error
    return judge(name, case, prompt)


def try_rows(chosen: Sequence[str], cases: Iterable[Case]) -> list[Verdict]:
    """Try all cases with each of the families."""
    listed = list(cases)

    async def tried() -> list[Verdict]:
        return [await _tried(name, case) for name in chosen for case in listed]

    return asyncio.run(tried())


def all_cases(short: bool = False) -> list[Case]:
    """Return the cases as they were written, and as files give them back; with `short` few of each kind."""
    written = written_cases()
    if not short:
        return [*written, *stored_cases(written)]
    return [*written[::23], *stored_cases(written, 17)]


def summary(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return the figures of the last line."""
    counted = Counter(verdict.counts_as for verdict in verdicts)
    return {
        "families": len({verdict.family for verdict in verdicts}),
        "cases": len(verdicts),
        **{key: counted[key] for key in VERDICTS},
    }


def report(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table of families and roles, and each case that went wrong, alike ones together."""
    chosen = list(dict.fromkeys(verdict.family for verdict in verdicts))
    roles = list(dict.fromkeys(verdict.case.role for verdict in verdicts))
    lines = ["| row | " + " | ".join(chosen) + " |", "|---" * (len(chosen) + 1) + "|"]
    counted: dict[tuple[str, str], Counter[str]] = {}
    for verdict in verdicts:
        counted.setdefault((verdict.case.role, verdict.family), Counter())[verdict.counts_as] += 1
    for role in roles:
        cells = [_cell(counted.get((role, name), Counter())) for name in chosen]
        lines.append(f"| {role} | " + " | ".join(cells) + " |")
    lines += ["", "A cell has the numbers of rows shown and refused; behind `!` lost, silent and honestly refused.", ""]
    for kind in VERDICTS[2:]:
        wrong = [verdict for verdict in verdicts if verdict.counts_as == kind]
        lines += [f"## {kind}: {len(wrong)}", ""]
        by_case: dict[str, list[Verdict]] = {}
        for verdict in wrong:
            by_case.setdefault(verdict.case.name, []).append(verdict)
        for case_name, group in sorted(by_case.items(), key=lambda item: -len(item[1])):
            where = list(dict.fromkeys(verdict.family for verdict in group))
            shown = ", ".join(where) if len(where) < len(chosen) else "all families"
            lines.append(f"- {case_name}: {len(group)} ({shown})")
            lines.append(f"  - {group[0].family}: {group[0].why}")
        lines.append("")
    return "\n".join(lines)


def _cell(counted: Counter[str]) -> str:
    wrong = [counted[key] for key in VERDICTS[2:]]
    bad = f" ! {'/'.join(map(str, wrong))}" if any(wrong) else ""
    return f"{counted['shown']}+{counted['refused']}{bad}"


def run(chosen: Sequence[str], short: bool = False) -> list[Verdict]:
    """Try the rows with families, print a table and errors, and return the verdicts.

    Args:
        chosen: Names of the families.
        short: As in `all_cases`.
    """
    cases = all_cases(short)
    with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as processes:
        verdicts = [
            each for tried in processes.map(try_rows, [[name] for name in chosen], repeat(cases)) for each in tried
        ]
    table = Table("family", "cases", *VERDICTS, title="rows")
    for name in chosen:
        own = summary([verdict for verdict in verdicts if verdict.family == name])
        table.add_row(name, str(own["cases"]), *(str(own[key]) for key in VERDICTS))
    console = Console(width=110)
    console.print(table)
    wrong = [verdict for verdict in verdicts if verdict.counts_as in VERDICTS[2:]]
    for verdict in wrong[:20]:
        line = f"{verdict.family}: {verdict.case.name}: {verdict.counts_as}: {verdict.why[:300]}"
        console.print(line, markup=False, highlight=False)
    return verdicts
