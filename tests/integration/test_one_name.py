"""`rollout.name=sglang_async` is verl's `sglang` with our servers; `sglang` alone is verl's own, in every process."""

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.warm_python import run_warm

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore::UserWarning")]

ROLLOUT = "actor_rollout_ref.rollout"
OURS = {f"{ROLLOUT}.name": "sglang_async", f"{ROLLOUT}.agent.default_agent_loop": "multiturn_agent"}
OWN = f"+{ROLLOUT}.custom.multiturn.derived.own_server"
ETA = f"+{ROLLOUT}.custom.multiturn.max_staleness"
OWN_FLAG = "{multiturn: {derived: {own_server: True}}}"
PD = f"{ROLLOUT}.disaggregation.enabled"
RANK, MODE = "actor_rollout_ref.model.lora_rank", "trainer.v1.trainer_mode"


def composed(**changes: str) -> Any:
    from tests.trainer_config import compose_config

    return compose_config([f"{key}={value}" for key, value in {**OURS, **changes}.items()])


def named(**changes: str) -> Any:
    """Return a configuration whose name has been changed, after the checks that come before that."""
    from verl_multiturn.verl_bridge.startup.refusals import BEFORE_PLATFORM
    from verl_multiturn.verl_bridge.startup.setting_changes import copy_settings, unify_name
    from verl_multiturn.verl_bridge.startup.table import check
    from verl_multiturn.verl_bridge.startup.view import RunView

    config = composed(**changes)
    check(RunView(config), BEFORE_PLATFORM)
    copy_settings(config)
    unify_name(config)
    return config


def runs_ours(config: Any) -> bool:
    from verl.utils.config import omega_conf_to_dataclass

    from verl_multiturn.verl_bridge.settings import runs_our_server

    rollout = config.actor_rollout_ref.rollout
    ours = runs_our_server(rollout)
    assert runs_our_server(omega_conf_to_dataclass(rollout)) is ours  # as every worker reads it
    return ours


def test_our_name_becomes_verls() -> None:
    config = named()
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, dict(rollout.custom.multiturn)) == ("sglang", {"derived": {"own_server": True}})
    assert runs_ours(config)


def test_verls_name_stays_verls() -> None:
    config = named(**{f"{ROLLOUT}.name": "sglang"})
    assert (config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.get("custom")) == ("sglang", None)
    assert not runs_ours(config)


@pytest.mark.parametrize("name", ["sglang", "sglang_async"])
def test_a_configuration_that_was_named_already_stays(name: str) -> None:
    config = named(**{f"{ROLLOUT}.name": name, OWN: "True"})
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert runs_ours(config)


def test_the_users_own_section_keeps_its_keys_and_their_order() -> None:
    own = "{theirs: {b: 1, a: 2}, multiturn: {tool_timeout_s: 5, max_tool_calls: 3}, last: x}"
    custom = named(**{f"+{ROLLOUT}.custom": own}).actor_rollout_ref.rollout.custom
    assert list(custom) == ["theirs", "multiturn", "last"]
    assert list(custom.theirs) == ["b", "a"]
    assert list(custom.multiturn.items()) == [
        ("tool_timeout_s", 5),
        ("max_tool_calls", 3),
        ("derived", {"own_server": True}),
    ]


@pytest.mark.parametrize(
    "places",
    [
        {"+shared": "{multiturn: {max_tool_calls: 3}}", f"+{ROLLOUT}.custom": "${shared}"},
        {"+shared": "{max_tool_calls: 3}", f"+{ROLLOUT}.custom.multiturn": "${shared}"},
    ],
)
def test_a_section_that_stands_elsewhere(places: dict[str, str]) -> None:
    config = named(**places)
    assert dict(config.actor_rollout_ref.rollout.custom.multiturn) == {
        "max_tool_calls": 3,
        "derived": {"own_server": True},
    }
    assert "own_server" not in str(config.shared)
    assert runs_ours(config)


def test_reward_models_and_teachers_are_verls() -> None:
    from verl_multiturn.verl_bridge.settings import own_server, runs_our_server

    config = named(
        **{
            "reward.reward_model.rollout": "${actor_rollout_ref.rollout}",
            "+distillation.teacher_models.second": "{inference: {name: sglang_async, prompt_length: 7}}",
            "+distillation.teacher_models.last": "{inference: {name: sglang, custom: " + OWN_FLAG + "}}",
        }
    )
    teachers = config.distillation.teacher_models
    sections = [config.reward.reward_model.rollout, *(teacher.inference for teacher in teachers.values())]
    assert len(sections) == 4
    for section in sections:
        assert (section.name, own_server(section), runs_our_server(section)) == ("sglang", None, False)
    assert teachers.second.inference.prompt_length == 7
    assert runs_ours(config)


@pytest.mark.parametrize(
    "changes",
    [
        {RANK: "8"},
        {"actor_rollout_ref.model.lora.rank": "8", "model_engine": "megatron"},
        {RANK: "8", MODE: "colocate_async", ETA: "1"},
        {RANK: "8", MODE: "separate_async", "actor_rollout_ref.model.lora.merge": "True"},
        {MODE: "separate_async", f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"},
    ],
    ids=str,
)
def test_what_verl_gives_its_own_name_alone(changes: dict[str, str]) -> None:
    assert runs_ours(named(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{ROLLOUT}.pipeline_model_parallel_size": "2"},
            "pipeline_model_parallel_size=2: verl 0.9.1 does not place SGLang's pipeline stages on its GPUs; leave it",
        ),
        (
            {RANK: "8", MODE: "separate_async"},
            "model.lora_rank=8 with trainer.v1.trainer_mode='separate_async': verl 0.9.1 sends the base model",
        ),
        (
            {"actor_rollout_ref.model.lora.rank": "8", MODE: "separate_async", f"{ROLLOUT}.name": "sglang"},
            "model.lora.rank=8 with trainer.v1.trainer_mode='separate_async': verl 0.9.1 sends the base model",
        ),
        ({PD: "True", ETA: "0"}, "max_staleness=0 with actor_rollout_ref.rollout.disaggregation.enabled=True: servers"),
        ({PD: "True", f"{ROLLOUT}.over_sample_rate": "0.25"}, "over_sample_rate=0.25 with actor_rollout_ref.rollout."),
        ({PD: "True", OWN: "True"}, "own_server=True with actor_rollout_ref.rollout.disaggregation.enabled=True: "),
        ({OWN: "False"}, "own_server=False with actor_rollout_ref.rollout.name='sglang_async': the name sglang_async"),
        ({OWN: "True", f"{ROLLOUT}.name": "vllm"}, "own_server=True with actor_rollout_ref.rollout.name='vllm': our"),
        ({OWN: "1"}, "own_server: Input should be a valid boolean"),
    ],
)
def test_what_is_refused(changes: dict[str, str], message: str) -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(ConfigError, match=re.escape(message)):
        named(**changes)


def test_disaggregated_servers_are_verls(capsys: pytest.CaptureFixture[str]) -> None:
    config = named(**{PD: "True"})
    assert "name='sglang_async' with " in capsys.readouterr().err
    assert (config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.get("custom")) == ("sglang", None)
    assert not runs_ours(config)


CLASSES = """
import os
os.environ.update(VERL_PLATFORM="nvidia", RANK="0", RAY_LOCAL_WORLD_SIZE="1")
for name in ("SGLANG_USE_CPU_ENGINE", "VERL_ENGINE_DEVICE"):
    os.environ.pop(name, None)
import ray
import verl
from types import SimpleNamespace
from omegaconf import OmegaConf
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

replica_class = get_rollout_replica_class("sglang")
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter
rollout_class = get_rollout_class("sglang")
model = SimpleNamespace(lora_rank=0, lora={}, get=lambda *_: None)
FLAG = {"multiturn": {"derived": {"own_server": True}}}

def config(custom):
    return RolloutConfig(name="sglang", tensor_model_parallel_size=1, custom=custom, prompt_length=8, response_length=8)

def made(custom, cls=replica_class, **kind):
    return cls(0, config(custom), model, 1, **kind)

def server_of(replica):
    return replica.server_class.__ray_actor_class__

def rollout(custom, cls=rollout_class):
    return cls(config=config(custom), model_config=model, device_mesh=None)

# verl's own, exactly.
for custom in (None, {}, {"multiturn": {}}, {"multiturn": {"derived": {"own_server": False}}}, {"theirs": 1}):
    assert type(made(custom)) is SGLangReplica
    assert server_of(made(custom)) is SGLangHttpServer
    assert type(rollout(custom)) is ServerAdapter
assert "verl_multiturn.verl_bridge.loops.spmd" not in __import__("sys").modules
assert "verl_multiturn.verl_bridge.servers.replica" not in __import__("sys").modules

# Ours, except of reward models and teachers.
from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout
from verl_multiturn.verl_bridge.servers.replica import AsyncSGLangReplica
from verl_multiturn.verl_bridge.servers.server import AsyncSGLangServer
assert type(made(FLAG)) is AsyncSGLangReplica
assert server_of(made(FLAG)) is AsyncSGLangServer
assert type(rollout(FLAG)) is AsyncSGLangRollout
for kind in ("is_reward_model", "is_teacher_model"):
    assert type(made(FLAG, **{kind: True})) is SGLangReplica
whole = OmegaConf.create({"_target_": "verl.workers.config.RolloutConfig", "name": "sglang", "custom": FLAG,
    "tensor_model_parallel_size": 1, "prompt_length": 8, "response_length": 8})
assert type(replica_class(replica_rank=0, config=whole, model_config=model, gpus_per_node=1)) is AsyncSGLangReplica

# What counts as what.
for stands, verls, ours, base in (
    (replica_class, SGLangReplica, AsyncSGLangReplica, RolloutReplica),
    (rollout_class, ServerAdapter, AsyncSGLangRollout, BaseRollout),
):
    assert issubclass(stands, verls) and issubclass(stands, base)
    assert issubclass(verls, stands) and issubclass(ours, stands)
    assert not issubclass(base, stands) and not issubclass(int, stands)
assert isinstance(made(None), replica_class) and isinstance(made(FLAG), replica_class)
assert isinstance(rollout(None), rollout_class) and isinstance(rollout(FLAG), rollout_class)

# Classes of a user's own.
class Mine(replica_class):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mine = True

class MyRollout(rollout_class):
    pass

mine = made(None, Mine)
assert type(mine) is Mine and mine.mine and server_of(mine) is SGLangHttpServer
assert isinstance(mine, replica_class) and isinstance(mine, SGLangReplica)
assert not isinstance(made(None), Mine) and not isinstance(made(FLAG), Mine)
assert type(rollout(None, MyRollout)) is MyRollout

# Programs that bypass the start-up check.
assert get_rollout_class("sglang_async") is AsyncSGLangRollout
assert get_rollout_replica_class("sglang_async") is AsyncSGLangReplica

# Another package's classes.
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl_multiturn.verl_bridge.servers import registrations
assert registrations.another_class() is None
before = RolloutReplicaRegistry._registry["sglang"]
RolloutReplicaRegistry.register("sglang", lambda: Mine)
assert registrations.another_class().name == "__main__.Mine"
RolloutReplicaRegistry.register("sglang", lambda: type("Good", (AsyncSGLangReplica,), {}))
assert registrations.another_class() is None
RolloutReplicaRegistry._registry["sglang"] = before
base._ROLLOUT_REGISTRY[("sglang", "async")] = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"
assert registrations.another_class().place == "_ROLLOUT_REGISTRY"
print("whole")
"""


def test_the_classes_of_a_process_on_a_gpu() -> None:
    done = run_warm("-c", CLASSES)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["whole"]), done.stderr[-3000:]


def test_another_packages_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_multiturn import ConfigError

    package: Any = ModuleType("another")
    package.Replica = type("Replica", (), {"__module__": "another"})
    monkeypatch.setitem(sys.modules, "another", package)
    monkeypatch.setitem(RolloutReplicaRegistry._registry, "sglang", lambda: package.Replica)
    with pytest.raises(
        ConfigError, match=r"name='sglang_async': our classes must stand .* has another.Replica; derive"
    ):
        named()
    assert not runs_ours(named(**{f"{ROLLOUT}.name": "sglang"}))


@pytest.mark.parametrize("place", ["llm_server_manager", "standalone_server_manager"])
def test_a_replica_of_another_class_is_refused_in_the_run(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.servers.client import RolloutClient
    from verl_multiturn.verl_bridge.trainer.hooks import MultiTurnHooks

    config = named()
    verls = SimpleNamespace(config=config, _load_balancer=None)
    trainer: Any = object.__new__(type("Trainer", (MultiTurnHooks, Base), {}))
    trainer.config, trainer.client, trainer.llm_server_manager = config, verls, Manager()
    assert isinstance(trainer.get_llm_client(), RolloutClient)
    setattr(trainer, place, Manager(object()))
    with pytest.raises(
        ConfigError, match=r"needs our servers, and a replica is a builtins.object; derive it from verl_"
    ):
        trainer.get_llm_client()
    trainer.config = named(**{f"{ROLLOUT}.name": "sglang"})
    assert trainer.get_llm_client() is verls


class Base:
    """A trainer of verl's, as far as its client goes."""

    client: Any

    def get_llm_client(self) -> Any:
        return self.client


class Manager:
    """A manager of servers, as far as its replicas go."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = replicas

    def get_replicas(self) -> tuple[Any, ...]:
        return self.replicas
