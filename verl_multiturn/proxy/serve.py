"""`verl-multiturn serve`: tries an agent against the endpoint, on a scripted engine. No model, no GPU.

    verl-multiturn serve --turn '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' --turn "It is 5."

It prints the address and the key of one session, until Ctrl-C; or it runs an agent, as a training run does, and ends
with it. Then it shows what would be trained: each generation, what it continues and which row it is in, and whether the
certificate finds the rows right. A tiny tokenizer and a ChatML-like template stand in for a model's own, and calls are
in the Hermes format.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.certificate.receipts import Receipt, ReceiptingEngine, Receipts
from verl_multiturn.certificate.records import record_of
from verl_multiturn.certificate.verification import verify_record
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.parsing.reasoning import THINK
from verl_multiturn.config import ProxySettings
from verl_multiturn.errors import ConfigError, MultiTurnError
from verl_multiturn.proxy.agent import SessionAddress
from verl_multiturn.proxy.agent_end import AgentEnd
from verl_multiturn.proxy.endpoint import Endpoint
from verl_multiturn.proxy.prompt_rendering import PromptRenderer
from verl_multiturn.proxy.proxy_run import ProxyRun
from verl_multiturn.proxy.runners import AgentRunner, build_runner, check_agent
from verl_multiturn.proxy.server import ProxyServer
from verl_multiturn.proxy.turn_reading import TurnReader
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.scripted import ScriptedEngine
from verl_multiturn.rollout.scripted_chat import TinyBuilder, tiny_tokenizer
from verl_multiturn.rollout.stop_texts import StopTexts

OVER = "The script has no more turns."
"""What the model says when all turns were said. Most agents end at such a text."""
_LONGEST_S = 24 * 3600.0
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
    prompt: Annotated[str, typer.Option(help="The prompt in the data row that --agent or COMMAND gets.")] = "Hello.",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND…]", help="An agent as a command, to run in the same way.")
    ] = None,
) -> None:
    """Try an agent against the endpoint: a scripted model answers it, and what would be trained is shown."""
    try:
        runner = _runner(agent, command)
        said = _turns(turns or [], script)
        outcome, receipts = asyncio.run(_play(scripted_run(said), runner, prompt, host))
    except MultiTurnError as error:
        typer.echo(f"verl-multiturn: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not _shown(outcome, receipts):
        raise typer.Exit(1)


def scripted_run(turns: Sequence[str]) -> ProxyRun:
    """Return what a session shares with no other: a model that says `turns` in the order in which it is asked.

    Args:
        turns: Texts of turns, without an end token. After them the model says `OVER`.
    """
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id]
    left = list(turns)

    def say(request_id: str, ids: Sequence[int], turn: int) -> list[int]:
        return tokenizer.encode((left.pop(0) if left else OVER) + tokenizer.eos_token)

    codec = ChatCodec(TinyBuilder(tokenizer), ends, firewall=Firewall(tokenizer), tokenizer=tokenizer)
    return ProxyRun(
        engine=ReceiptingEngine(StopTexts(ScriptedEngine(say), tokenizer)),
        renderer=PromptRenderer(codec, ends),
        reader=TurnReader(JsonParser(tokenizer, ends), tokenizer, ends, [THINK]),
        limits=Limits(prompt_length=_FAR, response_length=_FAR),
        fill_id=tokenizer.eos_token_id,
    )


class _Waiting:
    """In the place of a runner: an agent that somebody starts elsewhere, and that is done at Ctrl-C."""

    stuck = 0

    async def run(self, row: Mapping[str, Any], address: SessionAddress, time_up: asyncio.Event) -> AgentEnd:
        """Print the address, and wait."""
        for name, value in (
            ("OPENAI_BASE_URL", address.base_url),
            ("OPENAI_API_KEY", address.api_key),
            ("ANTHROPIC_BASE_URL", address.anthropic_base_url),
            ("ANTHROPIC_API_KEY", address.api_key),
        ):
            typer.echo(f"export {name}={value}")
        typer.echo("Start the agent with these variables. Ctrl-C when it is done.")
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, interrupted.set)
        waiting = [asyncio.create_task(event.wait()) for event in (interrupted, time_up)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            for task in waiting:
                task.cancel()
        return AgentEnd("returned")

    async def aclose(self) -> None:
        """Do nothing."""


def _runner(agent: str | None, command: Sequence[str] | None) -> AgentRunner | None:
    """Return what runs the agent; None: somebody starts it elsewhere.

    Raises:
        ConfigError: It cannot be run.
    """
    if agent is None and not command:
        return None
    settings = ProxySettings(agent=agent, command=list(command) if command else None)
    check_agent(settings)
    return build_runner(settings)


def _turns(turns: Sequence[str], script: Path | None) -> list[str]:
    """Return all turns.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        lines = [] if script is None else script.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--script {str(script)!r} cannot be read ({error}); name a text file") from None
    return [*turns, *(line for line in lines if line.strip())]


async def _play(run: ProxyRun, runner: AgentRunner | None, prompt: str, host: str) -> tuple[Outcome, list[Receipt]]:
    endpoint = Endpoint(run, runner or _Waiting(), ProxyServer(host), _LONGEST_S)
    try:
        return await endpoint.run("serve", {"raw_prompt": [{"role": "user", "content": prompt}]}, {})
    finally:
        await endpoint.aclose()
        run.renderer.close()


def _shown(outcome: Outcome, receipts: Sequence[Receipt]) -> bool:
    """Print what became of a session, and tell whether all is well."""
    places = outcome.generation_rows
    table = Table("", "continues", "given", "sampled", "trained", "said", title="completions")
    tokenizer = tiny_tokenizer()
    for number, (receipt, place, parent) in enumerate(zip(receipts, places, outcome.parents, strict=True)):
        text = tokenizer.decode(receipt.ids.tolist(), skip_special_tokens=True).replace("\n", " ")
        table.add_row(
            str(number),
            "" if parent is None else str(parent),
            f"{receipt.prompt_tokens} tokens",
            f"{len(receipt.ids)} tokens",
            f"in row {place}" if isinstance(place, int) else f"no: {place}",
            escape(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"),
        )
    console.print(table)
    rows = sum(any(row.trajectory.mask) for row in outcome.rows)
    causes = {str(place): places.count(place) for place in places if isinstance(place, str)}
    report = outcome.session
    assert report is not None
    counts = [f"{report.roots} roots", f"{rows} rows", f"{sum(isinstance(each, int) for each in places)} trained"]
    counts += [f"{count} {cause}" for cause, count in causes.items()]
    counts += [f"{name} in {count} requests changes nothing" for name, count in report.unenforced.items()]
    console.print(", ".join(counts), highlight=False, soft_wrap=True)
    ended = outcome.stop_reason is StopReason.FINISHED
    if not ended or outcome.error:
        console.print(f"[red]no[/] {outcome.stop_reason}: {escape(outcome.error)}", highlight=False, soft_wrap=True)
    elif report.reward is not None:
        console.print(f"the agent's reward is {report.reward:g}", highlight=False)
    own = Receipts.of_rows(outcome.request_id, receipts, places, invalid=not outcome.valid)
    verdict = verify_record(record_of(outcome, own, [row.trajectory for row in outcome.rows]))
    for violation in verdict.violations:
        console.print(str(violation), highlight=False, markup=False, soft_wrap=True)
    mark = "[red]no[/]" if verdict.violations else "[green]ok[/]"
    console.print(
        f"{mark} certificate: {verdict.sampled_tokens} sampled tokens, {len(verdict.violations)} violations",
        highlight=False,
    )
    return ended and not verdict.violations
