"""`ProxyAgentLoop`: takes a row from verl's worker, runs an agent behind an endpoint, returns its rows."""

from __future__ import annotations

from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.config import PATH
from verl_multiturn.harnesses.runners import build_runner
from verl_multiturn.proxy.endpoint import GOOD_AFTER_S, Endpoint
from verl_multiturn.proxy.http.server import ProxyServer
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun, build_proxy_run
from verl_multiturn.proxy.sessions.rows import load_select
from verl_multiturn.verl_bridge.closing import close_at_end
from verl_multiturn.verl_bridge.loops.agent_loop import shared_runner, spare_loaded
from verl_multiturn.verl_bridge.loops.life import follow, note_score
from verl_multiturn.verl_bridge.loops.runner import Runner
from verl_multiturn.verl_bridge.model.call_formats import reasoning_marks
from verl_multiturn.verl_bridge.model.chat_setup import make_chat
from verl_multiturn.verl_bridge.model.processors import plain_dict
from verl_multiturn.verl_bridge.names import PROXY_LOOP
from verl_multiturn.verl_bridge.servers.opponents import build_opponents
from verl_multiturn.verl_bridge.settings import settings_of, wall_clock_s

OPPONENT_S = 600.0
"""Seconds for an opponent's answer."""


class ProxyAgentLoop(AgentLoopBase):
    """The agent loop `proxy_agent`, which rolls out one row as one session of an agent.

    verl builds a new object for every request. The shared parts of requests are built once: a `Runner`, as for
    `multiturn_agent`, and an `Endpoint`.
    """

    # One endpoint for each client of the generation servers. A worker process has one client.
    _endpoints: ClassVar[dict[Any, Endpoint]] = {}

    def __init__(  # pylint: disable=super-init-not-called  # verl's __init__ makes a token builder for every request
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any
    ) -> None:
        self._runner = shared_runner(trainer_config.config, server_manager, tokenizer, hf_model_type, **kwargs)
        endpoint = self._endpoints.get(server_manager)
        if endpoint is None:
            endpoint = self._endpoints[server_manager] = build_endpoint(self._runner)
            close_at_end([endpoint])
            spare_loaded()  # the endpoint's modules, too
        self._endpoint = endpoint

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the agent for one row of the data; return the rows of its session.

        Args:
            sampling_params: verl's sampling parameters.
            row: verl's fields of the row, such as `raw_prompt`, `extra_info`, `uid` and `global_steps`.

        Raises:
            ConfigError, AgentContractError: The author of the data, the agent or the configuration made a mistake. No
                other error is raised.
        """
        runner = self._runner
        sampling = runner.sampling(sampling_params)
        with follow({"agent_name": PROXY_LOOP, **row}, runner.records) as life:
            outcome, receipts = await self._endpoint.run(life.id, row, sampling)
            outputs = runner.finish(outcome, receipts, row, int(row.get("global_steps") or 0), sampling)
            note_score(outputs)
        return outputs[0] if len(outputs) == 1 else list(outputs)


def build_endpoint(runner: Runner) -> Endpoint:
    """Build the endpoint that the sessions of one process share.

    Args:
        runner: The parts that conversations share, too.

    Raises:
        ConfigError: A setting or the agent cannot work.
    """
    settings = settings_of(runner.config.actor_rollout_ref.rollout)
    proxy, run = settings.proxy, build_run(runner)
    server, limit_s = ProxyServer(proxy.host), wall_clock_s(settings)
    agent = proxy.agent or (proxy.command or [""])[0]
    watch = runner.outages.of(f"agent {agent}", OutageLimits(), min(limit_s, GOOD_AFTER_S) + 60)
    return Endpoint(run, build_runner(proxy), server, limit_s, proxy.error_reward, watch)


def build_run(runner: Runner) -> ProxyRun:
    """Build the part that sessions share without their agents; see `build_endpoint`."""
    config, model = runner.config, runner.model
    proxy = settings_of(config.actor_rollout_ref.rollout).proxy
    # A codec of its own, since requests are rendered in a thread.
    chat = make_chat(
        model.tokenizer,
        model.model_type,
        plain_dict(config.data.get("apply_chat_template_kwargs")),
        processor=model.processor,
        mm_processor_kwargs=plain_dict(config.data.get("mm_processor_kwargs")),
    )
    return build_proxy_run(
        runner.engine,
        chat.codec,
        chat.end_ids,
        runner.parser,
        model.tokenizer,
        reasoning_marks(model.tokenizer),
        runner.limits,
        runner.output_settings.fill_id,
        proxy,
        load_select(proxy.select, f"{PATH}.proxy.select"),
        build_opponents(config, proxy, runner.outages, OPPONENT_S),
        model.read_images,
    )


def register_proxy_loop() -> None:
    """Register the agent loop with verl in this process, under the name `proxy_agent`."""
    register(PROXY_LOOP)(ProxyAgentLoop)
