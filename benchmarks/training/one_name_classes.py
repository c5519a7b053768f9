"""The classes that a run's processes really have, read by verl's own hook at a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class Classes(CheckpointCallback):
    """A `trainer.checkpoint_callback_class`: writes `classes.json` beside the folder of checkpoints."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **kwargs: Any) -> None:
        """Ask the trainer's process, each server, each training worker and each agent-loop worker."""
        replicas = trainer.llm_server_manager.get_replicas()
        found = {
            "trainer": [_name(trainer)],
            "replica": [_name(replica) for replica in replicas],
            "server": [_ask(server, _name) for replica in replicas for server in replica.servers],
            "rollout": [_ask(worker, _rollout) for replica in replicas for worker in replica.workers],
            "client": [_ask(worker, _client) for worker in trainer.agent_loop_manager.agent_loop_workers],
        }
        text = json.dumps({process: sorted(set(names)) for process, names in found.items()})
        (Path(checkpoint_dir).parents[1] / "classes.json").write_text(text)


def _ask(actor: Any, question: Any) -> str:
    answer: str = ray.get(actor.__ray_call__.remote(question))
    return answer


def _name(found: Any) -> str:
    # Ray derives a class of its own from each actor's.
    kind = next(each for each in type(found).__mro__ if not each.__module__.startswith("ray."))
    return f"{kind.__module__}.{kind.__qualname__}"


def _rollout(worker: Any) -> str:
    """Return the class of the rollout of a training worker, which may be one of several in its process."""
    workers = [worker, *getattr(worker, "worker_dict", {}).values()]
    return next(_name(each.rollout) for each in workers if getattr(each, "rollout", None) is not None)


def _client(worker: Any) -> str:
    return _name(worker.llm_client)
