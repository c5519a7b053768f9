"""The entry point `verl.plugins`. verl loads it at the end of `import verl`, in the driver and in every Ray worker.

Every registration of this package is here. verl hides an error that a plugin raises (it logs the error at DEBUG), so a
failure is printed here first. In the trainer's own process it ends the run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import wrapt

from verl_multiturn.interactions.old_verl import modules as verl_modules
from verl_multiturn.processes.driver import is_trainer

_TRAINERS = "verl.trainer.ppo.v1"
_LOSSES = "verl.trainer.ppo.core_algos"
_ENGINES = "verl.workers.engine.fsdp.transformer_impl"
# SGLang's own settings for external packages. SGLang reads them in its processes, which inherit the environment.
_SGLANG = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "verl_multiturn.verl_bridge.sglang.models",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "verl_multiturn.verl_bridge.sglang.processors",
}


def _register_trainers(_: ModuleType) -> None:
    with _told():
        import verl_multiturn.verl_bridge.trainer.trainers  # noqa: F401  # registers them


def _register_engines(_: ModuleType) -> None:
    with _told():
        from verl_multiturn.verl_bridge.prefix_tree.engine import register_engines

        register_engines()


def _register_losses(_: ModuleType) -> None:
    with _told():
        from verl_multiturn.verl_bridge.policy_losses import register_policy_losses

        register_policy_losses()


@contextmanager
def _told() -> Iterator[None]:
    """Print an error of a registration, and end the trainer's own process. verl would hide the error."""
    try:
        yield
    except Exception as error:  # any error: verl would hide it, so it is printed here and then raised
        print(
            f"\nverl-multiturn could not register with verl: {type(error).__name__}: {error}\n"
            "No rollout `sglang_async` and no agent loop of ours will be known. Run\n"
            "`verl-multiturn doctor`: it says which package is missing or has a version that does not fit.\n"
            "To train without this plugin, set VERL_USE_EXTERNAL_PLUGINS=none.\n",
            file=sys.stderr,
        )
        traceback.print_exc()
        if is_trainer():
            # Not an Exception: verl would swallow it and train without the plugin.
            raise SystemExit(1) from error
        raise


def register() -> None:
    """Register this package with verl.

    The rollout, its replica, the agent loop, the trainers, the training engines, the policy loss and the start-up check
    are registered, and the CPU platform where it is wanted. Modules that verl deleted are found again.
    """
    verl_modules.install()
    from verl_multiturn.verl_bridge.servers import registrations

    registrations.register_rollout()
    for name, package in _SGLANG.items():
        os.environ.setdefault(name, package)

    from verl_multiturn.cpu import activate

    if activate.wanted():
        activate.activate()

    from verl_multiturn.verl_bridge.loops import agent_loop, proxy_loop
    from verl_multiturn.verl_bridge.offline.from_records import loop as recorded_loop
    from verl_multiturn.verl_bridge.startup import configuration

    agent_loop.register_agent_loop()
    proxy_loop.register_proxy_loop()
    recorded_loop.register_recorded_loop()
    configuration.register_callback()

    # verl looks its trainers, engines and losses up just after it has imported them. Importing them here instead would
    # cost every worker that needs none of them a quarter of a second and five warnings.
    wrapt.register_post_import_hook(_register_trainers, _TRAINERS)
    wrapt.register_post_import_hook(_register_engines, _ENGINES)
    wrapt.register_post_import_hook(_register_losses, _LOSSES)


with _told():
    register()
