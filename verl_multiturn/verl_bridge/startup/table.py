"""The form of the start-up check's table: refused settings, the reason, and the remedy.

A row is data, so that the page of settings can list it. A check that needs more than settings, such as loading a
tokenizer, is a function among the rows, in the one order in which all of them run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.advantages.estimators import ESTIMATORS
from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import AGENT_LOOP, PROXY_LOOP
from verl_multiturn.verl_bridge.startup.view import LaterError, RunView

_NAMES = {"PATH": PATH, "AGENT_LOOP": AGENT_LOOP, "PROXY_LOOP": PROXY_LOOP, "ESTIMATORS": ", ".join(ESTIMATORS)}


@dataclass(frozen=True)
class RefusalRow:
    """Settings with which a run cannot work, or not as one would think.

    `why`, `remedy` and `given` are templates of `str.format`. They may name attributes of the run (`{run.estimator}`),
    the result of `when` (`{found}`), and names of ours (`{PATH}`).
    """

    key: str | tuple[str, ...]
    """The setting, or those that do not go together, by their paths in verl's configuration."""
    when: Callable[[RunView], Any]
    """Return something that is true where the row applies."""
    why: str
    """The fault, as a sentence behind a colon."""
    remedy: str
    given: str = ""
    """The begin of the message, before the colon; empty: the settings with their values."""
    is_refusal: bool = True
    """True: the run ends; False: it goes on with a warning."""

    def __call__(self, run: RunView) -> None:
        """Refuse the run, or warn of it, where the row applies.

        Raises:
            ConfigError: The row applies, and is a refusal.
        """
        if (message := self.message(run)) is None:
            return
        if self.is_refusal:
            raise ConfigError(message)
        run.tell(message)

    def message(self, run: RunView) -> str | None:
        """Return the row's message for a run; None where it does not apply."""
        if not (found := self.when(run)):
            return None
        shown = {"run": run, "found": found}
        given = fill(self.given, **shown) or named(self, lambda key: f"{key}={run.value(key)!r}")
        return f"{given}: {fill(self.why, **shown)}; {fill(self.remedy, **shown)}"


Check = RefusalRow | Callable[[RunView], None]


@dataclass(frozen=True)
class Section:
    """The checks of one subject."""

    title: str
    checks: Sequence[Check]
    applies: Callable[[RunView], Any] = lambda run: True
    at_once: Callable[[RunView, Sequence[Check]], None] | None = None
    """Reports all the checks, which are rows, in one message; None: each reports by itself."""


def check(run: RunView, sections: Iterable[Section]) -> None:
    """Ask all rows and functions in their order; of an early view, those that it can answer.

    Raises:
        ConfigError: The first refusal that applies.
    """
    for section in sections:
        if not section.applies(run):
            continue
        if section.at_once is not None:
            section.at_once(run, section.checks)
            continue
        for each in section.checks:
            with contextlib.suppress(LaterError):  # raised by an early view alone
                each(run)


def fill(template: str, **shown: Any) -> str:
    """Return the text of a template, with names of ours and the values `shown` of the run."""
    return template.format(**_NAMES, **shown)


def named(row: RefusalRow, form: Callable[[str], str]) -> str:
    """Return the settings of a row, each in a form: "the first", or "the first with the second and the third"."""
    first, *others = map(form, [row.key] if isinstance(row.key, str) else row.key)
    return f"{first} with {' and '.join(others)}" if others else first


def set_beside(keys: Iterable[str], when: Callable[[RunView], Any], why: str, remedy: str) -> list[RefusalRow]:
    """Return a row for each of several settings that must keep their defaults, `when` one reason holds for a run."""

    def row(key: str) -> RefusalRow:
        return RefusalRow(key, lambda run: when(run) and run.is_set(key), why, remedy)

    return [row(key) for key in keys]


def needs_our_trainer(key: str, when: Callable[[RunView], Any], otherwise: str) -> RefusalRow:
    """Return the row of a setting that only our trainers take; `otherwise` is the remedy without such a trainer."""
    return RefusalRow(
        key,
        when=lambda run: run.our_trainer is None and when(run),
        why="only verl's own V1 trainers take it, got trainer.use_v1={run.config.trainer.use_v1!r} and "
        "trainer.v1.trainer_mode={run.trainer_mode!r}",
        remedy=f"use one of them, or {otherwise}",
    )
