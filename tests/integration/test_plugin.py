"""The entry point: its registrations, and that a failure is loud."""

from typing import Any

import pytest

from tests.support.warm_python import executable, run_warm

pytestmark = pytest.mark.stack

BREAK = "import sys; sys.modules['verl.experimental.agent_loop.agent_loop'] = None; import verl; print('went on')"


def test_a_failed_registration_is_loud_and_says_the_remedy() -> None:
    done = run_warm("-c", BREAK)
    assert "verl-multiturn could not register with verl: ModuleNotFoundError" in done.stderr
    assert "verl-multiturn doctor" in done.stderr
    assert "went on" in done.stdout


def test_in_the_trainer_it_ends_the_run() -> None:
    done = run_warm("-c", BREAK, "-m", "verl.trainer.main_ppo")
    assert done.returncode == 1
    assert "went on" not in done.stdout


def test_what_import_verl_registers() -> None:
    program = """
import verl
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica
from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout
assert _agent_loop_registry["multiturn_agent"]["_target_"].endswith("MultiTurnAgentLoop")
assert issubclass(get_rollout_class("sglang_async"), AsyncSGLangRollout)
assert issubclass(get_rollout_replica_class("sglang_async"), SGLangReplica)
# Ours come with verl's trainers, and those only where they are asked for.
import sys
assert "verl.trainer.ppo.v1" not in sys.modules
from verl.trainer.ppo.v1 import get_trainer_cls
for mode in ("sync", "colocate_async", "separate_async"):
    assert issubclass(get_trainer_cls("multiturn_" + mode), get_trainer_cls(mode))
from verl.trainer.ppo.core_algos import get_policy_loss_fn
assert get_policy_loss_fn("mt_gspo").__module__ == "verl_multiturn.verl_bridge.policy_losses"
print(get_platform().device_name)
"""
    done = run_warm("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "cpu"


def test_modules_that_verl_deleted_are_found_in_workers_too() -> None:
    program = """
import sys, ray, verl

def find():
    from verl.interactions.base import BaseInteraction
    return BaseInteraction.__module__

from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl_multiturn.interactions.old_verl import classes
assert Gsm8kInteraction is classes.Gsm8kInteraction
from verl_multiturn.cpu.ray_start import adapt_start
adapt_start()  # the machine may be busy
own = {"py_executable": sys.argv[1]}
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=own)

@ray.remote
def worker():
    import verl
    return find()

print(ray.get(worker.remote()))
"""
    done = run_warm("-c", program, executable())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "verl_multiturn.interactions.old_verl.classes"


@pytest.mark.parametrize(
    "module", ["verl_bridge.startup.configuration", "verl_bridge.loops.agent_loop", "cpu.defaults", "plugin"]
)
def test_any_module_can_be_imported_first(module: str) -> None:
    program = f"""
import verl_multiturn.{module}
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl_multiturn.verl_bridge.startup.configuration import config_hooks
assert "multiturn_agent" in _agent_loop_registry
assert len(config_hooks) == 1
"""
    done = run_warm("-c", program)
    assert done.returncode == 0, done.stderr
    assert "could not register" not in done.stderr


def test_on_a_gpu_nothing_of_verl_is_replaced() -> None:
    program = """
import os; os.environ["VERL_PLATFORM"] = "nvidia"
import verl.utils.distributed
from verl.workers.rollout.base import _ROLLOUT_REGISTRY as rollouts
assert verl.utils.distributed.initialize_global_process_group_ray.__module__ == "verl.utils.distributed"
assert rollouts[("sglang", "async")] == "verl_multiturn.verl_bridge.loops.either_rollout.EitherRollout"
assert rollouts[("sglang_async", "async")] == "verl_multiturn.verl_bridge.loops.spmd.AsyncSGLangRollout"
assert "SGLANG_USE_CPU_ENGINE" not in os.environ
assert "verl_multiturn.cpu.cpu_platform" not in __import__("sys").modules
"""
    cleaned = "import os\nfor n in ('SGLANG_USE_CPU_ENGINE', 'VERL_ENGINE_DEVICE'): os.environ.pop(n, None)\n"
    done = run_warm("-c", cleaned + program)
    assert done.returncode == 0, done.stderr


async def test_a_tool_derived_from_verls_own_class() -> None:
    from verl.tools.base_tool import BaseTool as VerlTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    from verl_multiturn.calls.slots import Gates
    from verl_multiturn.chat.parsing.turns import ToolCall
    from verl_multiturn.tools.running.gate import Gate
    from verl_multiturn.tools.running.session import ToolSession

    class Remember(VerlTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            self.truth = kwargs["create_kwargs"]["ground_truth"]
            return await super().create(instance_id)

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return ToolResponse(text=f"{parameters['x']} {self.truth}"), 0.5, {"n": 1}

    raw = {
        "type": "function",
        "function": {
            "name": "remember",
            "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    tool = Remember({}, OpenAIFunctionToolSchema.model_validate(raw))
    kwargs = {"remember": {"create_kwargs": {"ground_truth": "42"}}}
    async with ToolSession("r1", {"remember": tool}, kwargs, Gates(Gate, 5), 1) as session:
        assert session.schemas[0] == raw
        (result,) = await session.execute([ToolCall("remember", '{"x": "y"}', "c")])
    assert (result.text, result.reward, result.metrics) == ("y 42", 0.5, {"n": 1})
