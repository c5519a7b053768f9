"""`verl-multiturn validate`: a tool YAML, an interaction YAML and the rows that name them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from verl_multiturn.checking.data_rows import RowCheck, validate_dataset
from verl_multiturn.checking.problem_groups import gather_alike
from verl_multiturn.cli.ends import NAME_A_MODEL, NO_STACK, fail, refuse
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.interactions.running.registry import check_row, load_interactions
from verl_multiturn.rows.checks import check_agent_name, check_scored
from verl_multiturn.tools.loading.registry import load_tools
from verl_multiturn.trust.files import require_plain_folder
from verl_multiturn.verl_bridge.names import LOOPS_OF_VERL, OUR_LOOPS, PROXY_LOOP, RECORDED_LOOP

console = Console()
_MOST_LINES = 20
"""Kinds of problems of a data set that are printed."""


def validate(
    tool_config: Annotated[Path | None, typer.Argument(help="The tool YAML that `tool_config_path` names.")] = None,
    interaction_config: Annotated[
        Path | None,
        typer.Option("--interactions", help="The interaction YAML that `interaction_config_path` names."),
    ] = None,
    dataset: Annotated[
        list[Path] | None, typer.Option("--dataset", help="A Parquet, JSONL or JSON file; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Count prompts with this model's tokenizer.")] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="`data.max_prompt_length` of the run.")] = 1024,
    tool_format: Annotated[str, typer.Option("--format", help="What `multi_turn.format` is set to.")] = "hermes",
    no_scores: Annotated[
        bool, typer.Option("--no-scores", help="Tools, users or a manager of your own score the rows.")
    ] = False,
) -> None:
    """Check a tool YAML, an interaction YAML, or both, and, if given, data sets.

    The checks: the classes, the tools' schemas, that each row's kwargs fit the tools and its interaction, that it can
    be scored and has an agent loop and, with --model, that its prompt fits.
    """
    try:
        if tool_config is None and interaction_config is None:
            raise ConfigError("nothing to validate; name a tool YAML, --interactions YAML, or both")
        tools = {} if tool_config is None else load_tools(tool_config)
        interactions = {} if interaction_config is None else load_interactions(interaction_config)
    except MultiTurnError as error:
        refuse(error)
    loaded = [("tool", name, tool) for name, tool in tools.items()]
    loaded += [("interaction", name, getattr(made, "old", made)) for name, made in interactions.items()]
    for kind, name, made in loaded:
        console.print(f"[green]ok[/] {kind} {name}: {type(made).__module__}.{type(made).__qualname__}", highlight=False)

    checks: list[RowCheck] = [
        partial(check_row, interactions=interactions),
        partial(check_agent_name, known=OUR_LOOPS | LOOPS_OF_VERL),
    ]
    if not no_scores:
        checks += [_check_scored, _check_criteria]
    measure = None
    if model is not None:
        try:
            require_plain_folder(Path(model))
            from verl_multiturn.verl_bridge.model.chat_setup import PromptMeasure
            from verl_multiturn.verl_bridge.model.loading import load_model

            measure = PromptMeasure(load_model({"path": model}, NAME_A_MODEL), tools, tool_format, interactions)
        except MultiTurnError as error:
            refuse(error)
        except ImportError as error:
            fail(NO_STACK.format(error=error))
    for path in dataset or []:
        try:
            rows, problems = validate_dataset(path, tools, measure, prompt_length, checks)
        except MultiTurnError as error:
            refuse(error)
        if problems:
            lines = gather_alike(problems)
            for line in lines[:_MOST_LINES]:
                console.print(f"[red]error[/] {escape(f'{path}: {line}')}", highlight=False, soft_wrap=True)
            if len(lines) > _MOST_LINES:
                console.print(f"[red]error[/] … and {len(lines) - _MOST_LINES} more", highlight=False)
            fail(f"{path}: {len(problems)} of {rows} rows cannot work")
        console.print(f"[green]ok[/] {escape(str(path))}: {rows} rows", highlight=False, soft_wrap=True)
    if measure is not None and measure.reasoning_left_out:
        console.print(
            f"[yellow]ok?[/] the chat template leaves the reasoning of {measure.reasoning_left_out} earlier messages "
            "out of the prompts, as it does with the model's own (docs/train/templates.md)",
            highlight=False,
            soft_wrap=True,
        )


def _check_scored(row: Mapping[str, Any], *, where: str) -> None:
    places = [row, extra_info if isinstance(extra_info := row.get("extra_info"), Mapping) else {}]
    has_user = any(place.get("interaction_kwargs") for place in places)
    # An agent gives the reward itself, and an interaction may.
    if not has_user and row.get("agent_name") not in (PROXY_LOOP, RECORDED_LOOP):
        check_scored(row, where=where)


def _check_criteria(row: Mapping[str, Any], *, where: str) -> None:
    """Refuse criteria of the row's own that `rubric` cannot read."""
    extra_info = row.get("extra_info")
    if isinstance(extra_info, Mapping) and extra_info.get("criteria") is not None and _is_rubrics(row):
        from verl_multiturn.rewards.criteria import criteria_of

        criteria_of(extra_info, (), where)


def _is_rubrics(row: Mapping[str, Any]) -> bool:
    """Return whether `rubric` scores a row without routes of the user's own."""
    from verl_multiturn.rewards.router import find_reward  # takes a while to import

    try:
        return find_reward(str(row.get("data_source")), {}) == "rubric"
    except ConfigError:
        return False
