"""The choices of the start-up check: trainers, keys that nothing reads, over-sampling, and the CPUs of a cluster."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_refusals import RIGHT, ROLLOUT, composed

pytestmark = pytest.mark.stack

MODEL = "actor_rollout_ref.model.path"
OVERRIDE = "actor_rollout_ref.model.override_config"


def test_what_the_check_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.chdir(tmp_path)
    config = composed(**{f"+{ROLLOUT}.custom.multiturn.record_dir": "records", "ray_kwargs.ray_init.num_cpus": "64"})
    configuration.prepare_config(config)
    ours = config.actor_rollout_ref.rollout.custom.multiturn
    assert ours.record_dir == str(tmp_path / "records")
    assert ours.derived.tool_config_path == RIGHT[f"{ROLLOUT}.multi_turn.tool_config_path"]
    assert config.actor_rollout_ref.rollout.multi_turn.tool_config_path is None
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang.device == "cpu"
    assert config.trainer.v1.trainer_mode == "multiturn_sync"


def test_our_router_stands_where_the_user_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.router import _load_router_yaml, _resolve_router_class

    from verl_multiturn.verl_bridge.servers.router import GroupRouter
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    router, cpus = f"{ROLLOUT}.router_config_path", {"ray_kwargs.ray_init.num_cpus": "64"}
    config = composed(**cpus)
    configuration.prepare_config(config)
    found = config.actor_rollout_ref.rollout.router_config_path
    assert _resolve_router_class(_load_router_yaml(found)["router_class"]) is GroupRouter
    (tmp_path / "mine.yaml").write_text("router_class: mine.Router")
    for changes, kept in (
        ({router: str(tmp_path / "mine.yaml")}, str(tmp_path / "mine.yaml")),
        ({f"+{ROLLOUT}.custom.multiturn.cache.lead_ms": "0"}, None),
        ({f"{ROLLOUT}.name": "sglang"}, None),
    ):
        config = composed(**cpus, **changes)
        configuration.prepare_config(config)
        assert config.actor_rollout_ref.rollout.get("router_config_path") == kept


def test_verls_old_key_of_interactions_moves_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.errors import InstantiationException
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    monkeypatch.chdir(tmp_path)
    gsm8k = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    Path("users.yaml").write_text(f"interaction: [{{class_name: {gsm8k}, config: {{}}}}]")
    changes = {f"+{ROLLOUT}.multi_turn.interaction_config_path": "users.yaml", "ray_kwargs.ray_init.num_cpus": "64"}
    config = composed(**changes)
    with pytest.raises(InstantiationException, match="unexpected keyword argument 'interaction_config_path'"):
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    configuration.prepare_config(config)
    assert config.actor_rollout_ref.rollout.custom.multiturn.interaction_config_path == str(tmp_path / "users.yaml")
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)

    both = composed(**changes)
    OmegaConf.update(both, f"{ROLLOUT}.custom.multiturn.interaction_config_path", "other.yaml", force_add=True)
    with pytest.raises(ConfigError, match=r"interaction_config_path='users.yaml': .*'other.yaml' names another file"):
        configuration.prepare_config(both)
    none = composed(**{f"+{ROLLOUT}.multi_turn.interaction_config_path": "null", "ray_kwargs.ray_init.num_cpus": "64"})
    configuration.prepare_config(none)
    assert "interaction_config_path" not in none.actor_rollout_ref.rollout.multi_turn


@pytest.mark.parametrize(
    ("changes", "mode", "told"),
    [
        (
            {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.checkpoint_engine.backend": "nccl"},
            "multiturn_separate_async",
            "",
        ),
        ({f"+{ROLLOUT}.custom.multiturn.certificate_share": "0.1"}, "multiturn_sync", ""),
        ({f"+{ROLLOUT}.custom.multiturn.certificate_share": "0"}, "multiturn_sync", ""),
        (
            {"trainer.v1.trainer_mode": "mine"},
            "mine",
            "trainer.v1.trainer_mode='mine': training batches are not verified",
        ),
        ({"trainer.use_v1": "False"}, "sync", "trainer.use_v1=False: training batches are not verified"),
        ({f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"}, "sync", "no row uses the agent loop multiturn_agent"),
    ],
)
def test_whose_trainer_runs(
    changes: dict[str, str],
    mode: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    config = composed(**{**changes, "ray_kwargs.ray_init.num_cpus": "64"})
    configuration.prepare_config(config)
    assert config.trainer.v1.trainer_mode == mode
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verl-multiturn:")]
    outages = [line for line in lines if "outage.stop_s" in line]
    assert len(outages) == told.startswith("trainer."), "another trainer leaves out nothing that an outage touched"
    assert len(lines) == bool(told) + len(outages)
    assert told in "".join(lines)


@pytest.mark.parametrize(
    ("most", "loop", "is_told"),
    [
        ("1024", "multiturn_agent", True),
        ("1025", "multiturn_agent", False),
        ("null", "multiturn_agent", False),
        ("1024", "tool_agent", False),
    ],
)
def test_conversations_that_are_longer_than_the_engine_takes_are_told(
    most: str, loop: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    changes = {f"{ROLLOUT}.max_model_len": most, f"{ROLLOUT}.agent.default_agent_loop": loop}
    configuration.prepare_config(composed(**changes, **{"ray_kwargs.ray_init.num_cpus": "64"}))
    told = f"{ROLLOUT}.max_model_len=1024: a conversation may have 1024 tokens"
    assert (told in capsys.readouterr().err) is is_told


@pytest.mark.parametrize(("tokens", "is_told"), [(1024, True), (1025, False)])
def test_conversations_that_are_longer_than_the_model_takes_are_told(
    tokens: int, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    changes = {f"+{OVERRIDE}.max_position_embeddings": str(tokens), "ray_kwargs.ray_init.num_cpus": "64"}
    configuration.prepare_config(composed(**changes))
    told = f"{ROLLOUT}.max_model_len=None: verl's SGLang servers take one token less than the {tokens} of the model's"
    lines = [line for line in capsys.readouterr().err.splitlines() if "max_model_len" in line]
    assert [told in line for line in lines] == [True] * is_told
    configuration.prepare_config(composed(**changes, **{f"{ROLLOUT}.max_model_len": str(tokens)}))
    with pytest.raises(ConfigError, match=f"max_model_len={tokens + 1}: .* refuse more than the {tokens} tokens"):
        configuration.prepare_config(composed(**changes, **{f"{ROLLOUT}.max_model_len": str(tokens + 1)}))


IMAGES = {"model_type": "qwen2_5_vl", "text_config": {"max_position_embeddings": 1024}}


@pytest.mark.parametrize(
    ("config", "override", "tokens"),
    [
        ({"model_type": "qwen2", "max_position_embeddings": 1024}, {}, 1024),
        ({"model_type": "llama"}, {}, 2048),  # the class's own
        ({"model_type": "gpt2", "n_positions": 512}, {}, 512),
        ({"model_type": "bloom"}, {}, None),
        ({"model_type": "no_such_model"}, {}, None),
        ({"model_type": "qwen2"}, {"max_position_embeddings": 1024}, 1024),
        ({"model_type": "qwen2"}, {"max_position_embeddings": "many"}, None),  # verl reports it when it loads the model
        ({"model_type": "qwen2"}, {"model_config": {"max_position_embeddings": 1024}}, 1024),
        ({"model_type": "qwen2"}, {"model_config": {}, "max_position_embeddings": 1024}, 32768),
        (IMAGES, {}, 1024),
        (IMAGES, {"text_config": {"max_position_embeddings": 8192}}, 8192),
        (None, {}, None),
    ],
)
@pytest.mark.parametrize("place", ["path", "hf_config_path"])
def test_the_models_tokens_are_those_that_verls_servers_read(
    config: dict[str, Any] | None, override: dict[str, Any], tokens: int | None, place: str, tmp_path: Path
) -> None:
    from omegaconf import OmegaConf
    from verl.workers.config import HFModelConfig
    from verl.workers.rollout.utils import get_max_position_embeddings

    from verl_multiturn.verl_bridge.model.loading import most_tokens

    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["A"]}))
    model = {"path": RIGHT[MODEL], place: str(tmp_path), "override_config": override}
    assert most_tokens(OmegaConf.create(model)) == tokens
    if tokens is not None:
        read = HFModelConfig(**{**model, "hf_config_path": str(tmp_path), "tokenizer_path": RIGHT[MODEL]})
        assert get_max_position_embeddings(read.hf_config) == tokens


@pytest.mark.parametrize(
    ("mode", "backend", "told"),
    [
        ("separate_async", "nixl", "checkpoint_engine.backend='nixl' needs an accelerator; on this CPU gloo carries"),
        ("separate_async", "nccl", ""),  # setting of `--mode separate_async`
        ("separate_async", "naive", ""),  # verl's default
        ("separate_async", "gloo", ""),
        ("colocate_async", "nixl", ""),  # verl looks at it in separate_async only
    ],
)
def test_a_replaced_checkpoint_engine_is_told(
    mode: str, backend: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn.cpu.defaults import fill_in

    config = composed(**{"trainer.v1.trainer_mode": mode, f"{ROLLOUT}.checkpoint_engine.backend": backend})
    fill_in(config, 64)
    lines = [line for line in capsys.readouterr().err.splitlines() if "checkpoint_engine" in line]
    assert len(lines) == bool(told)
    assert told in "".join(lines)


def test_a_run_on_a_cpu_has_no_dashboard_unless_it_is_asked_for() -> None:
    from verl_multiturn.cpu.defaults import fill_in

    for words, expected in (({}, False), ({"++ray_kwargs.ray_init.include_dashboard": "True"}, True)):
        config = composed(**words)
        fill_in(config, 64)
        assert config.ray_kwargs.ray_init.include_dashboard is expected


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("multi_turn.use_inference_chat_template", "True", "leave it out: the chat template of the model"),
        ("+multi_turn.num_repeat_rollouts", "4", "leave it out, and set rollout.n"),
    ],
)
def test_keys_that_nothing_reads_are_refused(
    key: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    plus, name = key[: key.startswith("+")], key.removeprefix("+")
    config = composed(**{f"{plus + plus}{ROLLOUT}.{name}": value})
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}={value}: nothing in verl 0.9.1 reads it; {remedy}"):
        configuration.prepare_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"over_sample_rate": "0.51"}, r"over_sample_rate=0\.51: expected a number from 0 to 0\.5, the share"),
        ({"over_sample_rate": "-0.1"}, r"over_sample_rate=-0\.1: expected a number"),
        ({"over_sample_rate": "1"}, r"over_sample_rate=1: expected a number"),
        ({"over_sample_rate": "nan"}, r"over_sample_rate=nan: expected a number"),
        ({"over_sample_rate": "inf"}, r"over_sample_rate=inf: expected a number"),
        ({"over_sample_rate": "'0.25'"}, r"over_sample_rate='0\.25': expected a number"),
        ({"over_sample_rate": "true"}, r"over_sample_rate=True: expected a number"),
        ({"over_sample_rate": "[0.25]"}, r"over_sample_rate=\[0\.25\]: expected a number"),
        (
            {"over_sample_rate": "0.25", "name": "sglang"},
            r"over_sample_rate=0\.25: with actor_rollout_ref\.rollout\.name='sglang' single generations cannot be",
        ),
        (
            {"over_sample_rate": "0.25", "trainer.use_v1": "False"},
            r"over_sample_rate=0\.25: only verl's own V1 trainers take it, got trainer\.use_v1=False",
        ),
        (
            {"over_sample_rate": "0.25", "trainer.v1.trainer_mode": "mine"},
            r"over_sample_rate=0\.25: only verl's own V1 trainers take it, .* trainer\.v1\.trainer_mode='mine'",
        ),
        (
            {"over_sample_rate": "0.25", "+agent.agent_loop_manager_class": "mine.Manager"},
            r"over_sample_rate=0\.25: .*agent_loop_manager_class='mine\.Manager' does not cut samples; leave it out",
        ),
    ],
)
def test_over_sampling_that_cannot_be(changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(ConfigError, match=message):
        over_sampled(changes, monkeypatch)


@pytest.mark.parametrize("rate", ["0", "0.0", "null", "0.25", "0.5"])
def test_over_sampling_that_can_be(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = over_sampled({"over_sample_rate": rate}, monkeypatch)
    agent = config.actor_rollout_ref.rollout.agent
    assert agent.agent_loop_manager_class == "verl_multiturn.verl_bridge.workers.manager.MultiTurnManager"
    off = over_sampled({"over_sample_rate": "0", "name": "sglang", "trainer.use_v1": "False"}, monkeypatch)
    assert off.actor_rollout_ref.rollout.over_sample_rate == 0


def over_sampled(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check a configuration with these settings of the rollout or the trainer, and return it."""
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    named = {"ray_kwargs.ray_init.num_cpus": "64"}
    for key, value in changes.items():
        plus, name = key[: key.startswith("+")], key.removeprefix("+")
        named[name if name.startswith("trainer.") else f"{plus}{ROLLOUT}.{name}"] = value
    config = composed(**named)
    configuration.prepare_config(config)
    return config


def test_a_cluster_that_is_not_joined_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge import settings

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert settings.cluster_address("ray://head:10001") == "ray://head:10001"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert settings.cluster_address(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert settings.cluster_address("auto") == "ray://head:10001"
    assert settings.cluster_address("local") is None  # Ray reads the variable for no address and "auto" alone


def cpu_config(address: str | None = None, **changes: Any) -> Any:
    from omegaconf import OmegaConf

    ray_init = {"address": address, "num_cpus": None if address else 4}
    return OmegaConf.create({"trainer": {"use_v1": True}, "ray_kwargs": {"ray_init": ray_init}, **changes})


def check_ray_cpus(monkeypatch: pytest.MonkeyPatch, config: Any, **parts: int) -> None:
    """Check the CPUs of a run that reserves these."""
    from verl_multiturn.verl_bridge.startup import ray_cpus
    from verl_multiturn.verl_bridge.startup.view import RunView

    monkeypatch.setattr(ray_cpus, "required_ray_cpus", lambda config: parts)
    ray_cpus.check_ray_cpus(RunView(config))


def test_the_cpus_of_trainers_that_reserve_others_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", None)  # nothing is joined
    with pytest.raises(ConfigError, match=r"has 4 logical CPUs and this run reserves 9, .*: 8 workers; 1 controller"):
        check_ray_cpus(monkeypatch, cpu_config(), workers=8, controller=1)
    for config in (
        cpu_config(trainer={"use_v1": False}),
        cpu_config(async_training={}),
        cpu_config(address="ray://head:10001"),
    ):
        check_ray_cpus(monkeypatch, config, workers=9)


class Cluster:
    """Ray's functions for a cluster of 4 logical CPUs."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def init(self, address: str, **kwargs: Any) -> None:
        self.called.append(address)

    def cluster_resources(self) -> dict[str, float]:
        self.called.append("resources")
        return {"CPU": 4.0, "GPU": 1.0}

    def shutdown(self) -> None:
        self.called.append("shutdown")


def test_a_cluster_with_too_few_cpus_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = "192.0.2.1:6379"
    for need, told in ((4, ""), (5, f"the cluster at {address}: Ray has 4 logical CPUs and this run reserves 5,")):
        cluster = Cluster()
        for name in ("init", "cluster_resources", "shutdown"):
            monkeypatch.setattr(f"ray.{name}", getattr(cluster, name))
        check_ray_cpus(monkeypatch, cpu_config(address), workers=need)
        assert cluster.called == [address, "resources", "shutdown"]
        said = capsys.readouterr().err
        assert told in said
        assert bool(said) == bool(told)


def test_a_dry_start_counts_only_the_cpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import ray_cpus

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cpus, "is_dry_start", lambda: True)
    monkeypatch.setattr("ray.init", None)  # nothing is joined
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    here, there = {"use_v1": True, "device": "cpu"}, {"use_v1": True, "device": "cuda"}
    unknown = {"ray_init": {"address": None, "num_cpus": None}}
    for config in (cpu_config("192.0.2.1:6379", trainer=here), cpu_config(trainer=there, ray_kwargs=unknown)):
        check_ray_cpus(monkeypatch, config, workers=10**6)
    for config in (cpu_config(trainer=here, ray_kwargs=unknown), cpu_config(trainer=there)):
        with pytest.raises(ConfigError, match="logical CPUs and this run reserves 1000000"):
            check_ray_cpus(monkeypatch, config, workers=10**6)
