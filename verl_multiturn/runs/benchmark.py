"""`plan_benchmark`: an evaluation by name as a planned run of the benchmark's recipe; `eval --benchmark` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.benchmarks.protocol import (
    EvaluationProtocol,
    NamedBenchmark,
    is_compared,
    read_protocol,
    refuse_other_rows,
)
from verl_multiturn.runs.plan import RunPlan, plan_run
from verl_multiturn.runs.setting_differences import words_that_change


@dataclass(frozen=True)
class BenchmarkOptions:
    """The name of a benchmark, and a user's options beside it."""

    name: str
    protocol: EvaluationProtocol
    data: str | None
    """The rows that the user fetched; None: those of an installed package, or made ones."""
    variants: tuple[str, ...]
    smoke: bool
    changes: tuple[str, ...]


def benchmark_options(
    name: str, rows: Sequence[Path], variants: Sequence[str], smoke: bool, changes: Sequence[str]
) -> BenchmarkOptions:
    """Check the options of an evaluation by name.

    Args:
        name: Name of the benchmark.
        rows: The file or the folder of fetched rows; [] for none.
        variants: Variants of its recipe that the user adds.
        smoke: Whether it is the smoke run, with made rows.
        changes: The user's Hydra overrides.

    Raises:
        ConfigError: There is no such benchmark, its rows are missing, or rows are named that it does not take.
    """
    protocol = read_protocol(name)
    refuse_other_rows(name, changes)
    if rows and (smoke or not protocol.is_fetched):
        has = "makes its own rows with --smoke" if smoke else f"has its rows from the {protocol.rows}"
        raise ConfigError(f"--rows {str(rows[0])!r}: {name} {has}; leave it out")
    if len(rows) > 1:
        raise ConfigError(f"--rows {[str(path) for path in rows]}: {name} is read from one file or folder; name one")
    if protocol.is_fetched and not rows and not smoke:
        raise ConfigError(protocol.needed(name))
    if rows and not rows[0].expanduser().exists():
        raise ConfigError(f"--rows {str(rows[0])!r}: there is no such file or folder; {protocol.needed(name)}")
    data = str(rows[0].expanduser().resolve()) if rows else None if smoke else protocol.source
    return BenchmarkOptions(name, protocol, data, tuple(variants), smoke, tuple(changes))


def plan_benchmark(options: BenchmarkOptions, out: Path) -> tuple[RunPlan, NamedBenchmark]:
    """Plan an evaluation by name: its recipe, with the protocol's words and then the user's.

    Args:
        options: The checked options.
        out: Folder of the evaluation.

    Raises:
        ConfigError: A word does not fit the recipe.
    """
    protocol = options.protocol
    by_protocol = plan_run(
        protocol.recipe,
        variants=protocol.variants,
        smoke=options.smoke,
        data=options.data,
        out=out,
        overrides=protocol.words(options.name, options.smoke),
    )
    variants = tuple(dict.fromkeys([*by_protocol.variants, *options.variants]))
    plan = plan_run(
        protocol.recipe,
        variants=variants,
        smoke=options.smoke,
        data=options.data,
        out=out,
        overrides=[*protocol.words(options.name, options.smoke), *options.changes],
    )
    added = [f"--variant {name}" for name in variants if name not in by_protocol.variants]
    added += ["--smoke"] if options.smoke else []
    words = [word for word in plan.overrides[len(by_protocol.overrides) :] if not is_compared(word)]
    with_variants = replace(by_protocol, variants=variants)
    added += [f"--set {word}" for word in words_that_change(with_variants, words)]
    return plan, NamedBenchmark(options.name, protocol, tuple(added))
