"""`MultiTurnAgentLoop`: takes a row from verl's worker, runs a `Conversation`, returns rows of the batch."""

from __future__ import annotations

import gc
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from verl_multiturn.calls.loop_blocks import CallWatch
from verl_multiturn.chat.images import as_they_are
from verl_multiturn.tools.loading.registry import schema_of
from verl_multiturn.verl_bridge.closing import close_at_end
from verl_multiturn.verl_bridge.loops.life import follow
from verl_multiturn.verl_bridge.loops.runner import Runner, build_runner
from verl_multiturn.verl_bridge.model.loading import LoadedModel
from verl_multiturn.verl_bridge.model.processors import image_reader
from verl_multiturn.verl_bridge.names import AGENT_LOOP
from verl_multiturn.verl_bridge.servers.verl_engine import VerlEngine

YOUNG = 50_000
"""New objects after which Python looks for garbage among them; its default is 700.

Conversations leave hardly anything to it: their objects go with their last reference. But while many begin at once,
their objects are new ones that stay, and it went through all of them again and again: a fifth of the worker's time with
2,048 conversations at once.
"""

# One runner for each client of the generation servers. A worker process has one client.
_runners: dict[Any, Runner] = {}


def shared_runner(
    config: Any, client: Any, tokenizer: Any, hf_model_type: str | None, processor: Any = None, **kwargs: Any
) -> Runner:
    """Return the `Runner` that all requests of this process share; the first one builds it.

    Args:
        config: verl's whole configuration.
        client: verl's client of the generation servers.
        tokenizer: The model's tokenizer.
        hf_model_type: `model_type` of the model's config.json.
        processor: The processor of a model that takes images; None for a text model.
        kwargs: verl's other arguments of agent loops, such as `dataset_cls`.

    Raises:
        ConfigError: A setting, a tool or the call format cannot work.
    """
    runner = _runners.get(client)
    if runner is None:
        read = as_they_are if processor is None else image_reader(processor, config.data, kwargs["dataset_cls"])
        model = LoadedModel(tokenizer, hf_model_type, processor, read)
        runner = _runners[client] = build_runner(config, model, VerlEngine(client.generate))
        CallWatch().start()  # as long as the worker lives
        close_at_end([*runner.tools.values(), *runner.interactions.values()])
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
        spare_loaded()
    return runner


def spare_loaded() -> None:
    """Exclude all loaded objects from Python's garbage collection: they are never garbage.

    A worker has millions of such objects: modules of PyTorch, verl and SGLang. Each full collection would go through
    all of them, and stop the event loop for a second.
    """
    gc.collect()
    gc.freeze()


def tool_schemas() -> list[Any] | None:
    """Return the schemas of this process's tools, as the template gets them; None as long as there is no runner."""
    for runner in _runners.values():
        return [schema_of(tool).as_dict() for tool in runner.tools.values()]
    return None


class MultiTurnAgentLoop(AgentLoopBase):
    """The agent loop `multiturn_agent`, which rolls out one row as one conversation.

    verl builds a new object for every request. The parts that requests can share are built once, in a `Runner`.
    """

    def __init__(  # pylint: disable=super-init-not-called  # verl's __init__ makes a token builder for every request
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, hf_model_type: str | None = None, **kwargs: Any
    ) -> None:
        self._runner = shared_runner(trainer_config.config, server_manager, tokenizer, hf_model_type, **kwargs)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Roll one row of the data out; return one row of the batch, or several where the context begins anew.

        Args:
            sampling_params: verl's sampling parameters.
            row: verl's fields of the row, such as `raw_prompt`, `extra_info`, `uid` and `global_steps`.

        Raises:
            ConfigError, ToolContractError, InteractionContractError: The author of the data, a tool, an interaction or
                the configuration made a mistake. No other error is raised.
        """
        runner = self._runner
        sampling = runner.sampling(sampling_params)
        with follow({"agent_name": AGENT_LOOP, **row}, runner.records) as life:
            request = await runner.request(row, sampling, life.id)
            outputs = await runner.outputs(request, row, int(row.get("global_steps") or 0))
        return outputs[0] if len(outputs) == 1 else list(outputs)


def register_agent_loop() -> None:
    """Register the agent loop with verl in this process, under the name `multiturn_agent`."""
    register(AGENT_LOOP)(MultiTurnAgentLoop)
