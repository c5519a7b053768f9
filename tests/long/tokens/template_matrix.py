"""Invariants of a trajectory, tried with real chat templates × call formats × parallel calls × texts × stops.

    python -m benchmarks.template_matrix [--cases N] [--table FILE]

`tests.support.template_play` plays a case; `test_template_matrix.py` has its cases drawn, too.
"""

from __future__ import annotations

import asyncio
import random

from rich.console import Console
from rich.table import Table

from tests import idle_loop
from tests.support.attacks import attacks, benign
from tests.support.families import Family, family, names
from tests.support.template_play import EXPLAINED, STOPS, WITHOUT_TOOLS, play, quoted_call, template_of
from verl_multiturn.chat.template import examine_template


def case(name: str, chance: random.Random) -> tuple[list[str], list[str], str]:
    """Draw the words, tool results and stop of a case for a family."""
    plain = ["sum", "café", "Größe", "北京", "число", "שלום", "مرحبا", "नमस्ते", "오늘", "naïve", "x1", "42", "emoji🙂"]
    words = [chance.choice(plain) for _ in range(chance.randint(1, 4))]
    hostile = attacks(_control_tokens(family(name)))
    results = [chance.choice(hostile if chance.random() < 0.5 else benign()) for _ in range(4)]
    stops = list(STOPS) if family(name).format else WITHOUT_TOOLS
    if family(name).format and chance.random() < 0.2:
        words[chance.randrange(len(words))] = quoted_call(name, chance)
        return words, results, "finished"
    return words, results, chance.choice(stops)


def _control_tokens(made: Family) -> list[str]:
    return sorted({str(token) for token in made.tokenizer.all_special_tokens} | set(made.tokenizer.get_added_vocab()))[
        :40
    ]


def table_of_rules() -> str:
    """Write families × rules as Markdown, with the output of `verl-multiturn doctor --model` for each."""
    rows, header = [], []
    for name in names():
        made = family(name)
        rules = asyncio.run(examine_template(template_of(name), tools=made.format is not None))
        by_name = {rule.name: rule.verdict.value for rule in rules}
        header = header if len(header) >= len(by_name) else list(by_name)
        tokenizer = made.tokenizer_source if made.real_tokenizer else "trained here"
        rows.append((name, made.template, tokenizer, made.format or "no tools", by_name))
    lines = [
        "# Chat templates and the rules they keep",
        "",
        "Written by `python -m benchmarks.template_matrix --table FILE`. *kept*: the rule holds; "
        "*known*: it does not, in a way that is understood and harmless (`verl-multiturn doctor --model PATH` says "
        "which way); *refused*: a run would train on tokens the model never saw, or never see a tool's answer. Where "
        "no package ships the family's tokenizer (\"trained here\"), a small BPE with the family's control tokens "
        "stands for it.",
        "",
        "| family | template | tokenizer | format | " + " | ".join(header) + " |",
        "|" + "---|" * (4 + len(header)),
    ]
    for name, template, tokenizer, tool_format, found in rows:
        verdicts = " | ".join(found.get(rule, "") for rule in header)
        lines.append(f"| {name} | {template} | {tokenizer} | {tool_format} | {verdicts} |")
    lines += ["", "Differences between a conversation built turn by turn and the template's own whole, explained:", ""]
    lines += [f"- {name}: *{difference}*: {why}." for name, (difference, why) in EXPLAINED.items()]
    lines += [
        "- wherever earlier reasoning is not kept: *reasoning*: the template leaves it out of earlier turns; the model "
        "saw it, so it stays.",
        "- wherever the model writes a call in another form than the template: *calls*; white space that a template "
        "strips: *whitespace*; another end token, or a turn cut short: *end*; the same text in other tokens: *tokens*.",
    ]
    return "\n".join(lines) + "\n"


def run(count: int) -> dict[str, int]:
    """Play drawn cases of all families, print the table and examples, and return the figures.

    Args:
        count: Number of cases of each family.
    """
    chance = random.Random(0)
    table = Table("family", "tokenizer", "format", "cases", "violations", title="invariants by family")
    examples: list[str] = []
    cases = violations = real = 0
    for name in names():
        made = family(name)
        broken_here = 0
        for _ in range(count):
            drawn = case(name, chance)
            broken = idle_loop.run(play(name, *drawn))  # a case may have 20 ms, on a busy machine, too
            broken_here += bool(broken)
            examples += [f"{name} {drawn}: {problem}"[:600] for problem in broken[:1]]
        cases += count
        violations += broken_here
        real += made.real_tokenizer
        shown = made.tokenizer_source if made.real_tokenizer else "trained here"
        table.add_row(name, shown, made.format or "no tools", str(count), str(broken_here))
    console = Console()
    console.print(table)
    for example in examples[:10]:
        console.print(example, markup=False, highlight=False)
    return {"families": len(names()), "real_tokenizers": real, "cases": cases, "violations": violations}
