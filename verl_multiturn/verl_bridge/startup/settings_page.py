"""Write the list on the page of refusals from the table of the start-up check.

    python -m verl_multiturn.verl_bridge.startup.settings_page

writes it into the page of this checkout; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from verl_multiturn.config import PATH
from verl_multiturn.verl_bridge.startup.refusals import BEFORE_PLATFORM, FILES, LAST, OWN_CODE, SETTINGS, VALUES, VERLS
from verl_multiturn.verl_bridge.startup.table import RefusalRow, Section, fill, named

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "refusals.md"
BEGIN = "<!-- Written by verl_multiturn/verl_bridge/startup/settings_page.py from the start-up check's table. -->"
END = "<!-- End of what is written. -->"

# A setting, with or without a value: two words joined by a dot, or one with a value.
_SETTING = re.compile(r"(?<![\w`/])(?:[a-z_…]\w*(?:\.\w+)+|[a-z_…][\w.…]*(?==))(?:=[^\s;,:)]+)?")
_NAMES = ("verl", "pip ")
"""Beginnings of texts that are names, which keep their small letter."""


class AnyValue:
    """Placeholder for any value of a run, in a text for all runs."""

    def __getattr__(self, name: str) -> AnyValue:
        return self

    def __getitem__(self, key: object) -> AnyValue:
        return self

    def __repr__(self) -> str:
        return "…"


def write_page(page: str) -> str:
    """Return the page with the table between its two marks.

    Args:
        page: The page as it is, with the marks.
    """
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{_refused()}\n{END}{rest.split(END)[1]}"


def _refused() -> str:
    sections = VALUES + FILES + BEFORE_PLATFORM + SETTINGS + VERLS + LAST + OWN_CODE
    return "\n".join(line for section in sections for line in _lines(section))


def _lines(section: Section) -> Iterator[str]:
    rows = [check for check in section.checks if isinstance(check, RefusalRow)]
    functions = [check for check in section.checks if not isinstance(check, RefusalRow)]
    yield f"\n## {section.title}\n"
    for function in functions:
        yield f"- {(function.__doc__ or '').splitlines()[0]}"
    if not rows:
        return
    yield from ["", "| setting | reason | remedy |", "|---|---|---|"][not functions :]
    for (why, remedy, is_refusal), group in groupby(rows, lambda row: (row.why, row.remedy, row.is_refusal)):
        keys = ", ".join(_listed([named(row, lambda key: f"`{_short(key)}`") for row in group]))
        warning = "" if is_refusal else " It is a warning: the run goes on."
        yield f"| {keys} | {_sentence(why)}{warning} | {_sentence(remedy)} |"


def _listed(keys: list[str]) -> Iterator[str]:
    """Yield settings; more than two of one section, one after another, as "section.{one, two, three}"."""
    for section, same in groupby(keys, lambda key: key.rpartition(".")[0] if key.count("`") == 2 else None):
        together = list(same)
        if section is None or len(together) < 3:
            yield from together
        else:
            yield f"{section}.{{{', '.join(key.strip('`').rpartition('.')[2] for key in together)}}}`"


def _sentence(template: str) -> str:
    """Return a template's text as a sentence, with a capital unless it begins with a name."""
    text = _text(template)
    is_name = text.startswith(_NAMES) or not re.match(r"[a-z]+\W", text)
    return (text if is_name else f"{text[0].upper()}{text[1:]}") + ("" if text.endswith((".", "…")) else ".")


def _text(template: str) -> str:
    return _SETTING.sub(r"`\g<0>`", _short(fill(template, run=AnyValue(), found=AnyValue())))


def _short(text: str) -> str:
    return text.replace(PATH, "custom.multiturn").replace("actor_rollout_ref.rollout.", "rollout.")


def main() -> None:
    """Write the page of this checkout."""
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
