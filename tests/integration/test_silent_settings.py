"""Settings of verl that do nothing are logged in one message; and the table of who reads each of verl's settings."""

import fnmatch
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_refusals import ROLLOUT, composed

pytestmark = pytest.mark.stack

ACTOR = "actor_rollout_ref.actor"
CPUS = {"ray_kwargs.ray_init.num_cpus": "64", "algorithm.adv_estimator": "grpo"}
MODE = f"+{ROLLOUT}.custom.multiturn.silent_settings"


@pytest.fixture(autouse=True)
def without_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])


def prepare(**changes: str) -> Any:
    from verl_multiturn.verl_bridge.startup.configuration import prepare_config

    config = composed(**{**CPUS, **changes})
    prepare_config(config)
    return config


def test_the_table_agrees_with_the_installed_verl() -> None:
    from verl_multiturn.verl_bridge.startup import verl_keys

    assert verl_keys.faults() == []


def test_a_default_below_the_home_folder_is_verls_own_also_where_it_is_expanded() -> None:
    """`eval` checks a configuration whose `~/` are expanded; no user wrote these settings."""
    from verl_multiturn.runs.compose import expand_homes
    from verl_multiturn.verl_bridge.startup.view import RunView

    config = composed(**CPUS)
    expand_homes(config)
    keys = ("skip.rollout.dump_dir", "skip.rollout_tq.dump_dir", "critic.model.path")
    assert [key for key in keys if "~" in str(RunView(config).value(key))] == []
    assert [key for key in keys if RunView(config).is_changed(key)] == []
    config.skip.rollout.dump_dir = "~/other"
    expand_homes(config)
    assert RunView(config).is_changed("skip.rollout.dump_dir")


def test_each_setting_that_nothing_reads_has_a_row() -> None:
    from verl_multiturn.verl_bridge.startup import verl_keys
    from verl_multiturn.verl_bridge.startup.refusals import BEFORE_PLATFORM, SETTINGS
    from verl_multiturn.verl_bridge.startup.table import RefusalRow

    checks = (check for section in BEFORE_PLATFORM + SETTINGS for check in section.checks)
    rows = [row.key for row in checks if isinstance(row, RefusalRow)]
    named = {key for keys in rows for key in ([keys] if isinstance(keys, str) else keys)}
    unread = {key for key in verl_keys.all_keys() if (entry := verl_keys.entry_of(key)) and entry.kind == "unread"}
    assert [key for key in sorted(unread) if not any(fnmatch.fnmatch(key, each) for each in named)] == []


def test_one_message_lists_all_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    from verl_multiturn import ConfigError

    several = {
        f"{ACTOR}.clip_ratio": "0.3",
        f"{ACTOR}.grad_clip": "0.5",
        f"{ROLLOUT}.enable_prefix_caching": "False",
        f"{ACTOR}.tau_pos": "2.0",
    }
    with pytest.raises(ConfigError) as refused:
        prepare(**several)
    said = str(refused.value)
    assert re.search(r"\n  - \S+clip_ratio=0.3: .*\n  - \S+grad_clip=0.5: .*optim.clip_grad\nand, less important", said)
    assert re.search(r"prefix_caching=False: .*disable_radix_cache.*\n  - \S+tau_pos=2.0: this has no effect", said)
    assert said.endswith("silent_settings=warn)")
    assert "do nothing here" not in capsys.readouterr().err


def test_with_warn_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(**{f"{ACTOR}.clip_ratio": "0.3", f"{ROLLOUT}.seed": "7", MODE: "warn"})
    told = capsys.readouterr().err
    assert told.count("verl-multiturn: settings of verl that do nothing here") == 1
    assert f"{ACTOR}.clip_ratio=0.3: " in told
    assert f"{ROLLOUT}.seed=7: " in told


def test_what_costs_only_speed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(**{f"{ACTOR}.use_torch_compile": "False"})
    told = capsys.readouterr().err
    assert f"{ACTOR}.use_torch_compile=False: nothing reads it; set fsdp_config.use_torch_compile" in told
    assert "ref.use_torch_compile" not in told  # it follows the actor's, and is not a setting of the user's


def test_a_run_that_could_not_resume_is_refused() -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(
        ConfigError, match=r"checkpoint\.async_save=True: only Megatron .* begins from scratch; leave it"
    ):
        prepare(**{f"{ACTOR}.checkpoint.async_save": "True"})


FSDP = f"{ACTOR}.fsdp_config"
CRITIC = {"algorithm.adv_estimator": "gae"}
FSDP2 = {f"{ACTOR}.strategy": "fsdp2"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{FSDP}.offload_policy": "True"}, f"{FSDP}.offload_policy=True: only fsdp2 reads it"),
        ({f"{FSDP}.offload_policy": "True", **FSDP2}, ""),
        ({f"{FSDP}.use_orig_params": "True"}, ""),
        ({f"{FSDP}.use_orig_params": "True", **FSDP2}, f"{FSDP}.use_orig_params=True: only fsdp reads it"),
        ({f"{FSDP}.wrap_policy.min_num_params": "9", **FSDP2}, "min_num_params=9: only fsdp reads it"),
        ({"critic.fsdp.offload_policy": "True", **CRITIC}, "critic.fsdp.offload_policy=True: only fsdp2 reads it"),
        ({"critic.checkpoint.async_save": "True", **CRITIC}, "critic.checkpoint.async_save=True: only Megatron reads"),
        ({"+critic.checkpoint.strict": "False", **CRITIC}, "critic.checkpoint.strict=False: only Megatron reads it"),
    ],
)
def test_what_another_engine_reads_is_told(
    changes: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(**changes)
    told = capsys.readouterr().err
    assert said in told
    assert bool(said) is ("do nothing here" in told)


CORRECTION = "algorithm.rollout_correction"
MODEL = "actor_rollout_ref.model"
TEACHERS = "distillation.teacher_models"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"algorithm.gamma": "0.9"},
            "gamma=0.9: this has no effect without algorithm.adv_estimator=gae or rein",
        ),
        (
            {"algorithm.lam": "0.9"},
            "lam=0.9: this has no effect without algorithm.adv_estimator=gae; leave it",
        ),
        (
            {f"{CORRECTION}.rollout_is_threshold": "3.0"},
            f"=3.0: this has no effect without {CORRECTION}.rollout_is",
        ),
        (
            {f"{CORRECTION}.rollout_rs_threshold": "3.0"},
            f"=3.0: this has no effect without {CORRECTION}.rollout_rs",
        ),
        (
            {
                "distillation.enabled": "True",
                "distillation.teacher_models.teacher_model.model_path": "a/b",
                "+distillation.teacher_models.other": "{model_path: c/d, inference: {load_format: auto}}",
            },
            "teacher_model.model_path='a/b': this has no effect: verl leaves the entry teacher_model out where there",
        ),
        (
            {
                "distillation.enabled": "True",
                f"+{TEACHERS}.a": "{model_path: a/b, inference: {name: vllm, load_format: auto, seed: 1}}",
                f"+{TEACHERS}.b": "{model_path: c/d, inference: {name: sglang, load_format: auto, seed: 7}}",
                f"+{TEACHERS}.c": "{model_path: e/f, inference: {name: sglang, load_format: auto, seed: 8}}",
            },
            f"\n  - {TEACHERS}.b.inference.seed=7, {TEACHERS}.c.inference.seed=8: SGLang is not started with it",
        ),
        ({f"{MODEL}.lora_alpha": "64"}, f"{MODEL}.lora_alpha=64: this has no effect without {MODEL}.lora_rank"),
        (
            {f"+{ROLLOUT}.custom.multiturn.checkpoint_evaluation.samples": "4"},
            "custom.multiturn.checkpoint_evaluation: this has no effect without trainer.checkpoint_callback_class=",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_part_that_is_off_is_told(changes: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(**changes)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm.gamma": "0.9", "algorithm.adv_estimator": "reinforce_plus_plus"},
        {f"{CORRECTION}.rollout_is_threshold": "3.0", f"{CORRECTION}.rollout_is": "token"},
        {f"{ACTOR}.clip_ratio": "0.3", f"{ACTOR}.clip_ratio_low": "0.3", f"{ACTOR}.clip_ratio_high": "0.3"},
        {f"{ACTOR}.clip_ratio": "0.3", f"{ACTOR}.clip_ratio_high": "0.3"},
        {f"{ROLLOUT}.val_kwargs.do_sample": "True", f"{ROLLOUT}.val_kwargs.temperature": "0.6"},
        {"actor_rollout_ref.model.use_remove_padding": "False"},
        {f"{ACTOR}.strategy": "fsdp2", "critic.strategy": "fsdp2"},
        {f"+{ROLLOUT}.repetition_penalty": "1.0"},
        {f"{ACTOR}.grad_clip": "0.5", "trainer.use_v1": "False"},
        {f"{ACTOR}.grad_clip": "0.5", f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.agent.default_agent_loop": "tool_agent"},
    ],
    ids=[
        "none",
        "discount",
        "weight",
        "clip_agrees",
        "clip_used",
        "sampled",
        "follows",
        "as_the_actors",
        "default",
        "old_trainer",
        "verls",
    ],
)
def test_what_is_not_told(capsys: pytest.CaptureFixture[str], changes: dict[str, str]) -> None:
    prepare(**changes)
    assert "do nothing here" not in capsys.readouterr().err


def test_defaults_of_an_engine_are_those_of_its_flat_file() -> None:
    from tests.trainer_config import compose_config
    from verl_multiturn.verl_bridge.startup.refusals.silent_settings import SILENT
    from verl_multiturn.verl_bridge.startup.table import RefusalRow
    from verl_multiturn.verl_bridge.startup.view import RunView

    given = ["model_engine=megatron", f"{ROLLOUT}.name=sglang_async", "algorithm.adv_estimator=grpo"]
    run = RunView(compose_config(given))
    assert [message for row in SILENT if isinstance(row, RefusalRow) and (message := row.message(run))] == []
    assert run.is_changed("data.train_batch_size") is False
    adapted = RunView(compose_config([*given, "actor_rollout_ref.model.lora_rank=16"]))
    told = [message for row in SILENT if isinstance(row, RefusalRow) and (message := row.message(adapted))]
    assert ["only Megatron" in message or "only FSDP reads it" in message for message in told] == [True]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str], Any]]:
    """Give a function that puts a table beside a verl with a flat file and a `reader.py`, and returns the module."""
    from verl_multiturn.verl_bridge.startup import verl_keys

    cached = (verl_keys.entries, verl_keys.defaults, verl_keys._text, verl_keys._names_in_scope)

    def forget() -> None:
        for function in cached:
            function.cache_clear()

    def put(flat: str, table: str, reader: str) -> Any:
        configs = tmp_path / "trainer" / "config"
        configs.mkdir(parents=True)
        for name in verl_keys.ENGINES.values():
            (configs / name).write_text(flat)
        (tmp_path / "reader.py").write_text(reader)
        (tmp_path / "table.tsv").write_text(table)
        monkeypatch.setattr(verl_keys, "TABLE", tmp_path / "table.tsv")
        monkeypatch.setattr(verl_keys, "verl_root", lambda: tmp_path)
        forget()
        return verl_keys

    yield put
    forget()


@pytest.mark.parametrize(
    ("flat", "table", "reader", "fault"),
    [
        ("lr: 1\ngone: 2\n", "lr\tread\treader.py\ngone\tunread\n", "config.lr", ""),
        ("lr: 1\nnew: 2\n", "lr\tread\treader.py\n", "config.lr", "new: no line of the table fits it"),
        ("lr: 1\n", "lr\tread\treader.py\nold\tread\treader.py\n", "config.lr", "old: the line holds for no setting"),
        ("lr: 1\n", "lr\tread\treader.py\n", "config.rate", "lr: its name stands in none of its places (reader.py)"),
        ("lr: 1\n", "lr\tread\tmoved.py\n", "config.lr", "lr: its name stands in none of its places (moved.py)"),
        ("lr: 1\n", "lr\tread\treader.py other.py\n", "config.lr", "lr: nothing that it holds for stands in other.py"),
        ("lr: 1\n", "lr\tunread\n", "x.get('lr')", "lr: said to be unread, and reader.py now names it"),
        ("lr: 1\n", "lr\tunread\treader.py\n", "x", "lr: reader.py does not name it any more"),
        ("s: {lr: 1}\n", "s.*\tread\treader.py:open(config.s)\n", "open(config.s)", ""),
        ("s: {lr: 1}\n", "s.*\tread\treader.py:s.\n", "'${s.lr}'", ""),
        ("s: {lr: 1}\n", "s.*\tread\treader.py:s.\n", "'${s.other}'", "s.lr: its name stands in none of its places"),
        ("lr: 1\n", "*\tread\treader.py\nlr\tunread\n", "x", "*: the line holds for no setting"),
        ("s: {a: 1, b: 2}\n", "s.{a,b}\tread\treader.py\n", "s.a + s['b']", ""),
        ("s: {a: 1}\n", "s.{a,b}\tread\treader.py\n", "s.a + s['b']", "s.b: the line holds for no setting"),
        ("lr: 1\n", "lr\tperhaps\treader.py\n", "config.lr", "lr: unknown kind 'perhaps'"),
        ("lr: 1\n", "lr\tunread\t\ttell\tnothing reads it\tleave it out\n", "x", ""),
        ("lr: 1\n", "lr\tunread\t\ttell\tnothing reads it\n", "x", "lr: a reason needs refuse or tell before it, a"),
        ("lr: 1\n", "l*\tunread\t\ttell\twhy\tleave it out\n", "x", "l*: a reason needs refuse or tell before it"),
        ("lr: 1\n", "lr\tunread\t\twarn\twhy\tleave it out\n", "x", "lr: a reason needs refuse or tell before it"),
    ],
)
def test_what_a_new_verl_changes_is_told_by_name(
    beside: Callable[[str, str, str], Any], flat: str, table: str, reader: str, fault: str
) -> None:
    faults = beside(flat, table, reader).faults()
    assert (faults == []) if not fault else any(told.startswith(fault) for told in faults), faults


def test_a_trace_that_disagrees_is_told_by_name(beside: Callable[[str, str, str], Any]) -> None:
    flat = "s: {_target_: verl.Section, used: 1, field: 2, dead: 3}"
    keys = beside(flat, "s.*\talways\treader.py\ns.dead\tunread\tchecks.py\n", "s.used + s.field")
    reads = [("s.used", "reader.py"), ("~Section.field", "reader.py"), ("s.dead", "checks.py"), ("other", "any.py")]
    assert keys.trace_faults(reads) == []
    assert keys.trace_faults(reads[1:]) == ["s.used: said to be read always, and nothing read it"]
    assert keys.trace_faults(reads[:1]) == ["s.field: said to be read always, and nothing read it"]
    assert keys.trace_faults([*reads, ("s.dead", "new.py")]) == ["s.dead: said to be unread, and new.py read it"]
    for of_no_use in ("verl_multiturn/verl_bridge/startup/view.py", "workers/config/actor.py"):
        assert keys.trace_faults([*reads, ("s.dead", of_no_use)]) == []
