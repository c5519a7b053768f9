"""What verl loads: the entry point `verl.plugins`, at the end of `import verl`, in the driver and every Ray worker.

Every registration of the package is here. verl hides what a plugin raises (it logs at DEBUG), so a failure is printed
here first; in the trainer's own process it ends the run.
"""

from __future__ import annotations

import sys
import traceback


def register() -> None:
    """Register the rollout, its replica, the agent loop, the start-up check and, where wanted, the CPU platform."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    base._ROLLOUT_REGISTRY[("sglang_async", "async")] = "verl_multiturn.verl_bridge.rollout.AsyncSGLangRollout"

    def load_replica() -> type:
        RolloutReplicaRegistry.get("sglang")  # verl's loader: prepares SGLang's import on a driver without a GPU
        from verl_multiturn.verl_bridge.replica import AsyncSGLangReplica

        return AsyncSGLangReplica

    RolloutReplicaRegistry.register("sglang_async", load_replica)

    from verl_multiturn.cpu import activate

    if activate.wanted():
        activate.activate()

    from verl_multiturn.verl_bridge import agent_loop, preflight

    agent_loop.register_agent_loop()
    preflight.register_callback()


def _is_trainer() -> bool:
    """Whether this process is a run of one of verl's `main_*` trainers."""
    return any("verl.trainer.main_" in part or "verl/trainer/main_" in part for part in sys.orig_argv)


try:
    register()
except Exception as error:  # whatever it is, verl would hide it; printed here, then raised
    print(
        f"\nverl-multiturn could not register with verl: {type(error).__name__}: {error}\n"
        "No rollout `sglang_async` and no agent loop `multiturn_agent` will be known. Run `verl-multiturn doctor`: it\n"
        "says which package is missing or has another version than verl 0.9.1 needs. To train without this plugin,\n"
        "set VERL_USE_EXTERNAL_PLUGINS=none.\n",
        file=sys.stderr,
    )
    traceback.print_exc()
    if _is_trainer():
        # Not an Exception: verl would swallow it and train without the plugin.
        raise SystemExit(1) from error
    raise
