"""`verl-multiturn serve`: tries an agent against the endpoint, on a scripted engine. No model, no GPU.

    verl-multiturn serve --turn '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' --turn "It is 5."

It prints the address and the key of one session, until Ctrl-C or SIGTERM; or it runs an agent, as a training run does,
and ends with it. Then it shows the rows that would be trained: each generation, its parent and its row, and
whether the certificate finds the rows right. A tiny tokenizer and a ChatML-like template replace a model's own,
and calls are in the Hermes format. The limits of a session are the settings' defaults.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.cli.ends import fail
from verl_multiturn.config import PATH, OutageSettings, ProxySettings, read_model
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.harnesses.runners import build_runner, check_agent
from verl_multiturn.proxy.agents.agent import SessionAddress
from verl_multiturn.proxy.agents.end import AgentEnd
from verl_multiturn.proxy.agents.runner import AgentRunner
from verl_multiturn.proxy.agents.waiting import WaitingRunner
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.opponents.addresses import opponents_at_addresses, read_opponents
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun, build_proxy_run
from verl_multiturn.proxy.sessions.rows import Select, load_select
from verl_multiturn.records.verify.record import verify_record
from verl_multiturn.records.write.encode import record_of
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.engines.stop_texts import StopTexts
from verl_multiturn.rollout.life import Life
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.scripted_chat import tiny_codec, tiny_tokenizer
from verl_multiturn.rows.files import read_text

OVER = "The script has no more turns."
"""Text of the model after the last turn. Most agents end at such a text."""
_OPTIONS = {
    "'agent' or 'command' is the agent, and both are set; set one of them": "one of them is the agent; leave one out",
    f"or set {PATH}.proxy.runner: process": "or run it as a command",
    f"{PATH}.proxy.agent": "--agent",
    f"{PATH}.proxy.python": "--python",
    f"{PATH}.proxy.command": "COMMAND",
    f"{PATH}.proxy.roles": "--role",
    "proxy.roles": "--role",
    "proxy.train": "--train",
    f"{PATH}.proxy.opponents": "--opponent",
    "proxy.opponents": "--opponent",
    f"{PATH}.proxy:": "--agent, COMMAND:",
    "proxy.host=": "--host=",
    "proxy.select=": "--select=",
}
"""Names of a run's settings in errors, and their names on this command line."""
_SETTINGS = f"{PATH}.proxy"
_LONGEST_S = 24 * 3600.0
_ANSWER_S = 600.0
"""Seconds for one answer of an opponent."""
_FAR = 1_000_000
_SHOWN = 60

console = Console()


def serve(
    turns: Annotated[
        list[str] | None, typer.Option("--turn", help="What the model says, turn by turn; repeatable.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="A file with what the model says, one turn a line; after those of --turn.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="An agent, as `module:function`, to run in the place of waiting for Ctrl-C.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="The Python interpreter of --agent, as the setting proxy.python."),
    ] = None,
    prompt: Annotated[str, typer.Option(help="The prompt in the data row that --agent or COMMAND gets.")] = "Hello.",
    row: Annotated[
        Path | None, typer.Option(help="A JSON file with the whole data row, in the place of --prompt.")
    ] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="The most tokens of a root's prompt.")] = _FAR,
    response_length: Annotated[int, typer.Option(min=1, help="The most tokens after a root's prompt.")] = _FAR,
    select: Annotated[str | None, typer.Option(help="As the setting proxy.select: `module:function`.")] = None,
    roles: Annotated[
        list[str] | None, typer.Option("--role", help="A role in which the agent asks, as proxy.roles; repeatable.")
    ] = None,
    train: Annotated[
        list[str] | None, typer.Option("--train", help="A role that is trained, as proxy.train; repeatable.")
    ] = None,
    opponents: Annotated[
        list[str] | None,
        typer.Option("--opponent", help="ROLE=ADDRESS: a model that plays a role, as proxy.opponents; repeatable."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND…]", help="An agent as a command, to run in the same way.")
    ] = None,
) -> None:
    """Try an agent against the endpoint: a scripted model answers it, and what would be trained is shown."""
    try:
        runner = _Interruptible(_runner(agent, python, command, host) or WaitingRunner(_show_address))
        if row is not None and runner.waits:
            raise ConfigError(f"--row {str(row)!r} is for an agent that is run here; give --agent or -- COMMAND, too")
        columns = {"raw_prompt": [{"role": "user", "content": prompt}]} if row is None else _row(row)
        said = ScriptedModel(_turns(turns or [], script))
        limits = Limits(prompt_length=prompt_length, response_length=response_length)
        played = {"roles": roles or None, "train": train or None, "opponents": read_opponents(opponents or [])}
        run = scripted_run(said, limits, load_select(select, "--select"), read_model(ProxySettings, played, _SETTINGS))
        outcome, receipts = asyncio.run(_play(run, runner, columns, host))
    except MultiTurnError as error:
        fail(_with_options(str(error)), status=2)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    is_well = _shown(outcome, receipts, is_scored=not runner.waits)
    if said.beyond:
        console.print(f"[yellow]note[/] {said.beyond} requests came after the script's last turn", highlight=False)
    if runner.is_interrupted and not runner.waits:
        raise typer.Exit(130)
    if not is_well:
        raise typer.Exit(1)


@dataclass
class ScriptedModel:
    """The turns of a scripted model."""

    left: list[str]
    """Turns that are still to come."""
    beyond: int = 0
    """Number of requests when there was none."""

    def next(self) -> str:
        """Return the next turn; `OVER` after the last one."""
        if self.left:
            return self.left.pop(0)
        self.beyond += 1
        return OVER


def scripted_run(
    script: ScriptedModel, limits: Limits, select: Select | None = None, settings: ProxySettings | None = None
) -> ProxyRun:
    """Return the parts of one session alone: a model that gives a script's turns, in the order of the requests.

    Args:
        script: Texts of turns, without an end token.
        limits: How long a row may be.
        select: Chooses the completions to train; None: all are.
        settings: Those of the endpoint; None: the defaults.

    Raises:
        ConfigError: An opponent is not at an address.
    """
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id]
    settings = settings or ProxySettings()

    def say(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        return tokenizer.encode(script.next() + tokenizer.eos_token)

    return build_proxy_run(
        ReceiptingEngine(StopTexts(ScriptedEngine(say), tokenizer)),
        tiny_codec(tokenizer),
        ends,
        JsonParser(tokenizer, ends),
        tokenizer,
        [THINK],
        limits,
        tokenizer.eos_token_id,
        settings,
        select,
        opponents_at_addresses(settings, Outages(OutageSettings(mode="mask")), _ANSWER_S),
    )


def _show_address(address: SessionAddress, _: asyncio.Event) -> None:
    """Print the address of a session whose agent is started elsewhere."""
    for name, value in (
        ("OPENAI_BASE_URL", address.base_url),
        ("OPENAI_API_KEY", address.api_key),
        ("ANTHROPIC_BASE_URL", address.anthropic_base_url),
        ("ANTHROPIC_API_KEY", address.api_key),
    ):
        typer.echo(f"export {name}={value}")
    typer.echo("Start the agent with these variables. Ctrl-C when it is done.")


class _Interruptible:
    """A runner for which a session's time is up at Ctrl-C or SIGTERM.

    Args:
        runner: Runs the agent.
    """

    def __init__(self, runner: AgentRunner) -> None:
        self._runner = runner
        self.is_interrupted = False
        self.waits = isinstance(runner, WaitingRunner)

    @property
    def stuck(self) -> int:
        """Return the number of agents that could not be ended."""
        return self._runner.stuck

    async def run(
        self,
        row: Mapping[str, Any],
        address: SessionAddress,
        time_up: asyncio.Event,
        returned: Callable[[], None] | None = None,
    ) -> AgentEnd:
        """Run the agent until it ends or is interrupted."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            self.is_interrupted = True
            time_up.set()

        signals = (signal.SIGINT, signal.SIGTERM)
        for each in signals:
            loop.add_signal_handler(each, interrupt)
        try:
            return await self._runner.run(row, address, time_up, returned)
        finally:
            for each in signals:
                loop.remove_signal_handler(each)

    async def aclose(self) -> None:
        """End the running work."""
        await self._runner.aclose()


def _runner(agent: str | None, python: str | None, command: Sequence[str] | None, host: str) -> AgentRunner | None:
    """Return the agent's runner; None: it is started elsewhere.

    Raises:
        ConfigError: It cannot be run.
    """
    if agent is None and not command:
        return None
    given = {"agent": agent, "python": python, "command": list(command) if command else None, "host": host or None}
    settings = read_model(ProxySettings, given, _SETTINGS)
    check_agent(settings)
    return build_runner(settings)


def _with_options(problem: str) -> str:
    """Return an error with the options that were written here in the place of a run's settings."""
    for setting, option in _OPTIONS.items():
        problem = problem.replace(setting, option)
    return problem


def _turns(turns: Sequence[str], script: Path | None) -> list[str]:
    """Return all turns.

    Raises:
        ConfigError: The file cannot be read.
    """
    text = "" if script is None else read_text(script, f"--script {str(script)!r}", "name a text file")
    lines = text.splitlines()
    return [*turns, *(line for line in lines if line.strip())]


def _row(path: Path) -> dict[str, Any]:
    """Return the data row in a file.

    Raises:
        ConfigError: The file has none.
    """
    where, expected = f"--row {str(path)!r}", "name a file with a JSON object"
    text = read_text(path, where, expected)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read ({error}); {expected}") from None
    except RecursionError:
        raise ConfigError(f"{where} cannot be read (it is nested too deeply); {expected}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--row {str(path)!r} has a JSON {type(found).__name__}, expected an object")
    if "prompt" in found:  # as the column of a data file is called; verl hands it over under this name
        found["raw_prompt"] = found.pop("prompt")
    return found


async def _play(run: ProxyRun, runner: AgentRunner, row: Mapping[str, Any], host: str) -> tuple[Outcome, list[Receipt]]:
    watch = Outages().of("agent", OutageLimits(mode="mask"), _LONGEST_S)  # one session waits for none
    endpoint = Endpoint(run, runner, ProxyServer(host), _LONGEST_S, watch=watch)
    try:
        return await endpoint.run("serve", row, {})
    finally:
        await endpoint.aclose()
        run.renderer.close()


def _shown(outcome: Outcome, receipts: Sequence[Receipt], is_scored: bool) -> bool:
    """Print the outcome of a session, and return whether all is well.

    Args:
        outcome: The session's outcome.
        receipts: The engine's output.
        is_scored: Whether its agent was run here, so that it could give a reward.
    """
    places = outcome.places
    report = outcome.session
    assert report is not None
    role = ["role"] if report.roles else []
    table = Table("", *role, "continues", "given", "sampled", "trained", "said", title="completions")
    tokenizer = tiny_tokenizer()
    for receipt, turn in zip(receipts, outcome.turns, strict=True):
        text = tokenizer.decode(receipt.ids.tolist(), skip_special_tokens=True).replace("\n", " ")
        table.add_row(
            str(turn.number),
            *([turn.role] if role else []),
            "" if turn.parent is None else str(turn.parent),
            f"{receipt.prompt_tokens} tokens",
            f"{len(receipt.ids)} tokens",
            f"in row {turn.place}" if isinstance(turn.place, int) else f"no: {turn.place}",
            escape(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"),
        )
    console.print(table)
    rows = sum(any(row.trajectory.mask) for row in outcome.rows)
    causes = {str(place): places.count(place) for place in places if isinstance(place, str)}
    counts = [f"{report.roots} roots", f"{rows} rows", f"{sum(isinstance(each, int) for each in places)} trained"]
    counts += [f"{count} {cause}" for cause, count in causes.items()]
    counts += [f"{name} changes nothing ({count} requests)" for name, count in report.unenforced.items()]
    console.print(", ".join(counts), highlight=False, soft_wrap=True)
    ended = outcome.stop_reason is StopReason.FINISHED
    if not ended or outcome.error:
        console.print(f"[red]error[/] {outcome.stop_reason}: {escape(outcome.error)}", highlight=False, soft_wrap=True)
    for name, played in report.opponents.items():
        count = sum(len(each.said) for each in report.requests if each.role == name)
        console.print(f"{name} was played by {escape(played)}: {count} answers, in no row", highlight=False)
    held = {turn.role for turn in outcome.turns if isinstance(turn.place, int)}
    shared = {} if report.reward is None else dict.fromkeys((r for r in report.roles if r in held), report.reward)
    if (rewards := report.rewards or shared) and outcome.valid:
        given = ", ".join(f"of {r} {own:g}{'' if r in held else ' (no row)'}" for r, own in rewards.items())
        console.print(f"the session's rewards are {given}", highlight=False)
    elif report.reward is not None and outcome.valid:
        console.print(f"the session's reward is {report.reward:g}", highlight=False)
    elif is_scored and outcome.valid:
        console.print("the agent gave no reward: in a run, compute_score decides", highlight=False)
    for turn in outcome.turns:
        if turn.reward is not None:
            console.print(f"completion {turn.number} has a reward of its own, {turn.reward:g}", highlight=False)
    verdict = verify_record(record_of(Life(outcome.request_id, outcome=outcome, generations=receipts)))
    for violation in verdict.violations:
        console.print(str(violation), highlight=False, markup=False, soft_wrap=True)
    mark = "[red]error[/]" if verdict.violations else "[green]ok[/]"
    console.print(
        f"{mark} certificate: {verdict.sampled_tokens} sampled tokens, {len(verdict.violations)} violations",
        highlight=False,
    )
    return ended and not verdict.violations
