"""Refusals of the launcher before verl, torch or Ray is imported, in the words of the start."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.conftest import ROOT
from verl_multiturn.cli.main import app
from verl_multiturn.cli.run import refuse_early
from verl_multiturn.config import PATH
from verl_multiturn.errors import ConfigError
from verl_multiturn.recipes import list_recipes
from verl_multiturn.runs.compose import compose_run
from verl_multiturn.runs.plan import MODES, find_recipe, in_full, plan_run
from verl_multiturn.runs.run import run_configuration
from verl_multiturn.verl_bridge.startup.refusals.agents import check_opponents
from verl_multiturn.verl_bridge.startup.refusals.rewards import REWARDS
from verl_multiturn.verl_bridge.startup.table import RefusalRow
from verl_multiturn.verl_bridge.startup.view import RunView

EXAMPLES = ROOT / "tests" / "support" / "verl_examples.tsv"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("VERL_PLATFORM", "WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def refusal(tmp_path: Path, *words: str, recipe: str = "quickstart", **options: Any) -> str:
    """Return the launcher's refusal of a run; empty where it would start it."""
    plan = plan_run(recipe, out=tmp_path / "out", overrides=words, **options)
    try:
        run_configuration(plan, refuse_early)
    except ConfigError as error:
        return str(error)
    return ""


FUNCTION = "reward.custom_reward_function"


def test_options_that_no_reward_function_takes(tmp_path: Path) -> None:
    routes = f"+{FUNCTION}.reward_kwargs.routes={{a: math}}"
    said = refusal(tmp_path, f"{FUNCTION}.path=null", routes)
    assert f"{FUNCTION}.path is not set, and verl's own reward takes no options; set it to pkg://verl_mult" in said


def test_our_routes_beside_a_function_of_ones_own_are_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def compute_score(**given): return 1.0")

    def told(path: str) -> list[str]:
        words = [f"{FUNCTION}.path={path}", f"+{FUNCTION}.reward_kwargs.routes={{a: math}}"]
        run = RunView(compose_run(plan_run("quickstart", out=tmp_path / "out", overrides=words)), is_early=True)
        rows = [row for row in REWARDS if isinstance(row, RefusalRow) and not row.is_refusal]
        return [said for row in rows if (said := row.message(run)) is not None]

    (said,) = told(str(tmp_path / "own.py"))
    assert said.startswith(
        f"{FUNCTION}.reward_kwargs.routes={{'a': 'math'}}: it is an option of verl_multiturn.rewards."
    )
    assert "own.py:compute_score gets it as a keyword, and routes nothing unless it does so itself" in said
    assert told("pkg://verl_multiturn.rewards") == []


def test_opponent_0_is_not_the_model_without_the_adapter_that_the_run_begins_with(tmp_path: Path) -> None:
    words = [f"++{ROLLOUT}.custom.multiturn.proxy.opponents={{black: [0]}}"]
    words += ["actor_rollout_ref.model.lora_adapter_path=adapters/first"]
    run = RunView(compose_run(plan_run("tictactoe", out=tmp_path / "out", overrides=words)), is_early=True)
    with pytest.raises(ConfigError, match="and the run begins with the adapter 'adapters/first' on it; merge the two"):
        check_opponents(run)


BOOL, WHOLE = "expected true or false; ", "expected a whole number; "
WRONG = [
    ("data.shuffle=off", f"data.shuffle='off': {BOOL}write data.shuffle=False"),
    (f"{ACTOR}.use_kl_loss=no", f"{ACTOR}.use_kl_loss='no': {BOOL}write {ACTOR}.use_kl_loss=False"),
    ('trainer.val_before_train="False"', f"trainer.val_before_train='False': {BOOL}"),
    (f"{ROLLOUT}.calculate_log_probs=y", f"{ROLLOUT}.calculate_log_probs='y': {BOOL}"),
    ("trainer.use_v1=on", "trainer.use_v1='on': expected true or false; write trainer.use_v1=True"),
    ("trainer.val_only=1", f"trainer.val_only=1: {BOOL}write trainer.val_only=True"),
    ("algorithm.use_kl_in_reward=null", f"algorithm.use_kl_in_reward=null: {BOOL}"),
    ("data.train_batch_size=16.0", f"data.train_batch_size=16.0: {WHOLE}write data.train_batch_size=16"),
    ('data.train_batch_size="16"', f"data.train_batch_size='16': {WHOLE}write data.train_batch_size=16"),
    ("data.train_batch_size=16.5", f"data.train_batch_size=16.5: {WHOLE}write its digits"),
    ("data.train_batch_size=True", f"data.train_batch_size=True: {WHOLE}"),
    ("trainer.total_epochs=ten", f"trainer.total_epochs='ten': {WHOLE}write its digits"),
    ("trainer.save_freq=null", f"trainer.save_freq=null: {WHOLE}"),
    ("data.max_prompt_length=1k", f"data.max_prompt_length='1k': {WHOLE}write data.max_prompt_length=1024"),
    (f'{ACTOR}.optim.lr="1e-6"', f"{ACTOR}.optim.lr='1e-6': expected a number; write {ACTOR}.optim.lr=1e-6"),
    ("data.train_files=5", "data.train_files=5: expected text or a list; "),
    ("data.seed=1.5", "data.seed=1.5: expected a whole number or null; "),
    ("algorithm.kl_ctrl=off", "algorithm.kl_ctrl='off': expected a section"),
    (
        "data.train_batch_size=${oc.env:HOME}",
        "a variable is text: write 'data.train_batch_size=${oc.decode:${oc.env:HOME}}'",
    ),
    ("data.train_batch_size=0", "data.train_batch_size=0: expected a whole number of at least 1"),
    (f"{ROLLOUT}.n=-1", f"{ROLLOUT}.n=-1: expected a whole number of at least 1"),
    (f"{ACTOR}.ppo_mini_batch_size=0", f"{ACTOR}.ppo_mini_batch_size=0: expected a whole number of at least 1"),
    ("algorithm.adv_estimator=rlooo", "adv_estimator='rlooo': nobody has registered it; did you mean 'rloo'?"),
    ("algorithm.adv_estimator=zzz", "algorithm.adv_estimator='zzz': nobody has registered it; choose one of ["),
    (f"{ACTOR}.policy_loss.loss_mode=vanila", "nobody has registered it; did you mean 'vanilla'?"),
    ("trainer.logger=[console,tensorbord]", "verl has no logger 'tensorbord'; did you mean 'tensorboard'?"),
    ("trainer.logger=[console,wandb]", "'wandb' is not logged in on this machine; set WANDB_API_KEY"),
    ("trainer.logger=wandb", "'wandb' is not logged in on this machine; set WANDB_API_KEY"),
    ("trainer.logger='[console,file]'", "trainer.logger='[console,file]': expected a list, got text"),
    ("trainer.logger=[clearml]", "trainer.logger: 'clearml' needs the package clearml, which is not installed; pip "),
    ("recipe.on_cpu=off", "recipe.on_cpu='off': expected true or false; write recipe.on_cpu=True or =False"),
    ("data=5", "quickstart: Config group override must be a string or a list. Got int"),
    ("=5", "quickstart: Config group override must be a string or a list. Got int"),
    ("mt.tool_reward.mod=add", "did you mean 'mode'?"),
    ("mt.tool_reward.mode=ad", "Input should be 'none', 'add' or 'replace', got 'ad'"),
    (f"{ROLLOUT}.multi_turn.tool_config_path=no/such.yaml", "'no/such.yaml' is no file"),
    ("reward.custom_reward_function.path=no_reward.py", "there is no such file; correct the path"),
    ("actor_rollout_ref.model.path=./no_model", "there is no such folder"),
    ("trainer.v1.trainer_mode=colocate_asink", "no trainer has this name; did you mean 'colocate_async'?"),
    (f"{ROLLOUT}.multi_turn.max_parallel_calls=two", f"{ROLLOUT}.multi_turn.max_parallel_calls='two': {WHOLE}"),
]


@pytest.mark.parametrize(("word", "message"), WRONG, ids=[word for word, _ in WRONG])
def test_a_value_that_is_refused_before_verl_is_imported(tmp_path: Path, word: str, message: str) -> None:
    assert message in refusal(tmp_path, word)


REWARD = "reward.custom_reward_function.reward_kwargs"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("judge.short_words=4", f"{REWARD}.judge.short_words=4: it is fixed at 3; leave it out"),
        ("gsm8k.methd=flexible", f"{REWARD}.gsm8k.methd: unknown setting; did you mean 'method'?"),
        ("gsm8k.method=flexibel", "Input should be 'strict' or 'flexible', got 'flexibel'"),
        ("routes={my/data*: jugde}", f"{REWARD}.routes['my/data*']: 'jugde' is no reward; known are ['code', "),
        ("routes={my/data*: no_module.score}", ""),
        ("gsm8k.method=flexible", ""),
    ],
)
def test_options_of_our_rewards_are_looked_at_before_verl_is_imported(tmp_path: Path, word: str, message: str) -> None:
    said = refusal(tmp_path, f"+{REWARD}.{word}", recipe="gsm8k_multiturn")
    assert (said == "") is (message == "")
    assert message in said
    assert f"{REWARD}=5: expected a mapping" in refusal(tmp_path, f"+{REWARD}=5", recipe="gsm8k_multiturn")
    assert refusal(tmp_path, f"+{REWARD}.{word}") == ""  # the recipe has a function of its own


@pytest.mark.parametrize(
    "word",
    [
        "data.shuffle=false",
        f"{ACTOR}.optim.lr=1",
        f"{ACTOR}.entropy_coeff=1",
        "data.seed=null",
        "trainer.logger=console",
        "trainer.logger=[console,file]",
        "mt.tool_reward.mode=add",
        f"{ROLLOUT}.custom.multiturn.tool_reward.mode=add",
        f"+{ROLLOUT}.custom.multiturn.tool_reward.mode=add",
        "+mt.tool_timeout_s=5",
        "~mt.record_dir",
        "+my.own_key=off",
        "data.train_batch_size=${oc.decode:'64'}",
        f"{ROLLOUT}.enable_prefix_caching=False",
    ],
)
def test_right_values_are_taken_and_what_is_only_told_waits_for_the_start(
    tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(tmp_path, word) == ""
    assert capsys.readouterr() == ("", "")


def test_what_a_variable_is_told_to_be_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "64")
    said = refusal(tmp_path, "data.train_batch_size=${oc.env:SIZE}")
    assert refusal(tmp_path, said.partition("write '")[2].partition("'")[0]) == ""


@pytest.mark.parametrize("word", ["trainer.logger=[console,tensorbord]", "trainer.logger='[console,file]'"])
def test_names_of_loggers_are_looked_at_for_another_machine_too(tmp_path: Path, word: str) -> None:
    plan = plan_run("quickstart", out=tmp_path / "out", overrides=[word])
    with pytest.raises(ConfigError, match=r"^trainer\.logger"):
        run_configuration(plan, functools.partial(refuse_early, is_here=False))


def test_a_logger_with_an_account_or_without_the_net_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert refusal(tmp_path, "trainer.logger=[console,wandb]") == ""
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert refusal(tmp_path, "trainer.logger=[console,wandb]") == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("deploy_to=127.0.0.1", "checkpoint_evaluation: deploy_to and deploy_key_env need each other; set both"),
        ("deploy_to=gateway,deploy_key_env=NO_KEY", "deploy_to: expected an address such as 'http://127.0.0.1:8000"),
        ("deploy_to='http://gateway:1',deploy_key_env=NO_KEY", "the environment variable 'NO_KEY' is not set here"),
    ],
)
def test_a_gateway_that_could_never_be_asked_is_refused_early(tmp_path: Path, given: str, message: str) -> None:
    ours = f"{ROLLOUT}.custom.multiturn.checkpoint_evaluation"
    words = [f"++{ours}.{each}" for each in given.split(",")]
    assert message in refusal(tmp_path, *words)


def test_a_micro_batch_that_does_not_divide_is_refused_early(tmp_path: Path) -> None:
    words = ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=4")
    assert "ppo_micro_batch_size_per_gpu=64 does not divide them; choose a divisor of 16" in refusal(tmp_path, *words)


PADDING = "actor_rollout_ref.model.use_remove_padding"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("data.train_batch_size=4",),
            f"data.train_batch_size=4 with {ACTOR}.ppo_mini_batch_size=16: verl takes no batch below a mini-batch "
            "where micro-batches count rows; raise the first to 16, lower the second to 4, or set "
            f"{ACTOR}.use_dynamic_bsz=True",
        ),
        (("data.train_batch_size=4", f"{ACTOR}.use_dynamic_bsz=True"), ""),
        (("data.train_batch_size=16",), ""),
        (
            (
                *("algorithm.adv_estimator=gae", "critic.model.path=${actor_rollout_ref.model.path}"),
                *(f"{ACTOR}.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=32"),
            ),
            "data.train_batch_size=16 with critic.ppo_mini_batch_size=32: verl takes no batch below a mini-batch",
        ),
        (("critic.ppo_mini_batch_size=32",), ""),  # there is no critic
        (
            ("trainer.n_gpus_per_node=16", "data.train_batch_size=17"),
            f"data.train_batch_size=17 with {ROLLOUT}.n=8: verl takes no batch of 136 conversations, which is no "
            "multiple of the trainer's 16 devices, where micro-batches count rows",
        ),
        (
            (f"{ACTOR}.ppo_micro_batch_size=16",),
            f"{ACTOR}.ppo_micro_batch_size=16 with {ACTOR}.ppo_micro_batch_size_per_gpu=64: verl takes one of the two",
        ),
        (
            (f"{ROLLOUT}.log_prob_micro_batch_size=16",),
            f"{ROLLOUT}.log_prob_micro_batch_size=16 with {ROLLOUT}.log_prob_micro_batch_size_per_gpu=128: verl takes ",
        ),
        (("actor_rollout_ref.ref.log_prob_micro_batch_size=16",), ""),  # there is no reference
        (
            (f"{ACTOR}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2", f"{PADDING}=False"),
            f"{ACTOR}.ulysses_sequence_parallel_size=2 with {PADDING}=False: ranks that hold a row together",
        ),
    ],
)
def test_sizes_that_verls_own_check_does_not_take(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """The `validate_config` of verl raises each of them, after half a minute and as a traceback."""
    micro = () if any("micro_batch_size=" in word for word in words) else (f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",)
    found = refusal(tmp_path, *micro, *words)
    assert message in found
    assert (found == "") is (message == "")


def test_gpus_that_engines_do_not_fill_and_adapters_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = "an engine takes 2 GPUs, and trainer.nnodes=1 × trainer.n_gpus_per_node=3 gives 3"
    for platform in ("nvidia", "cpu"):
        monkeypatch.setenv("VERL_PLATFORM", platform)
        words = ("trainer.n_gpus_per_node=3", f"{ROLLOUT}.tensor_model_parallel_size=2")
        assert three in refusal(tmp_path, *words, recipe="gsm8k_multiturn")
    lora = refusal(tmp_path, recipe="gsm8k_multiturn", variants=["lora"], mode="separate_async")
    assert "they would sample the untrained model for ever" in lora


def test_nothing_heavy_is_imported_and_the_trace_is_one_line(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from verl_multiturn.cli.main import main\n"
        "try: main()\n"
        "finally: print([name for name in ('verl', 'torch', 'ray', 'sglang', 'transformers') if name in sys.modules])\n"
    )
    words = ["run", "quickstart", "--out", str(tmp_path / "out"), "data.shuffle=off"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == "[]\n"
    assert done.stderr.splitlines() == [
        "verl-multiturn: data.shuffle='off': expected true or false; write data.shuffle=False"
    ]


def test_an_accepted_run_imports_nothing_heavy_either(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from verl_multiturn.cli.main import app\n"
        "app(standalone_mode=False)\n"
        "print([name for name in ('verl', 'torch', 'ray', 'sglang', 'transformers') if name in sys.modules])\n"
    )
    words = ["run", "gsm8k_multiturn", "--print", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def _configurations() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for name in list_recipes():
        variants = sorted({path.stem for path in find_recipe(name).glob("variant/*.yaml")})
        options: list[dict[str, Any]] = [{}, {"smoke": True}, *({"variants": [each]} for each in variants)]
        found += [(name, each) for each in options]
    return found


@pytest.mark.parametrize(("name", "options"), _configurations(), ids=str)
def test_every_configuration_of_a_recipe_is_taken(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    found = refusal(tmp_path, recipe=name, **options)
    # Another recipe trains its model before.
    assert found == "" or (name == "retool" and "there is no such folder" in found)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_taken(tmp_path: Path, mode: str) -> None:
    assert refusal(tmp_path, recipe="gsm8k_multiturn", mode=mode) == ""


def test_every_setting_of_verls_own_examples_is_taken() -> None:
    """The settings of 112 scripts of verl 0.9 (examples, end-to-end tests): key, value and `model_engine`."""
    from verl_multiturn.verl_bridge.startup import value_types

    parser, wrong = OverridesParser.create(), []
    lines = [line.split("\t") for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 800
    for key, text, engine in lines:
        value = parser.parse_override(f"{key}={text}").value()
        plain = value if isinstance(value, str) else OmegaConf.create({"value": value})["value"]
        if not value_types.fits(plain, value_types.kinds_of(key, engine)):
            wrong.append((key, text))
    assert wrong == []


def test_every_default_of_verl_has_its_own_type() -> None:
    from verl_multiturn.verl_bridge.startup import value_types, verl_keys

    untyped = set()
    for engine in verl_keys.ENGINES:
        for key, default in verl_keys.defaults(engine).items():
            kinds = value_types.kinds_of(key, engine)
            if not (isinstance(default, str) and "${" in default):
                assert value_types.fits(default, kinds), key
            if kinds == {"any"} and not key.endswith("_target_"):
                untyped.add(key)
    assert untyped == set()


@pytest.mark.parametrize(
    ("word", "full"),
    [
        ("mt.filter=skip", "++{}.filter=skip"),
        ("+mt.filter=skip", "++{}.filter=skip"),
        ("++mt.filter=skip", "++{}.filter=skip"),
        ("~mt.filter", "~{}.filter"),
        ("mt={filter: skip}", "++{}={{filter: skip}}"),
        ("mt.proxy.harbor.harness_kwargs={a: 1}", "{}.proxy.harbor.harness_kwargs={{a: 1}}"),
        ("+mt.tool_reward={mode: add}", "++{}.tool_reward={{mode: add}}"),
        ("actor_rollout_ref.rollout.custom.multiturn.void_turn_pattern=a=b", "++{}.void_turn_pattern=a=b"),
        ("mtx.filter=skip", "mtx.filter=skip"),
        ("data.shuffle=True", "data.shuffle=True"),
    ],
)
def test_a_setting_of_ours_in_full(word: str, full: str) -> None:
    assert in_full(word) == full.format(PATH)


def test_a_trainer_without_conversations_takes_no_setting_of_ours(tmp_path: Path) -> None:
    found = refusal(tmp_path, "mt.filter=skip", recipe="from_records")
    assert "have no effect: the trainer verl.trainer.sft_trainer holds no conversations" in found


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_a_part_of_a_warm_up_batch_is_taken(tmp_path: Path, mode: str) -> None:
    """A whole number is verl's default; its comment allows fractions."""
    assert refusal(tmp_path, f"trainer.v1.{mode}.num_warmup_batches=0.5", mode=mode) == ""


@pytest.mark.parametrize("word", ["derived.record_start=me", "derived={own_server: true}", "derived.own_server=False"])
def test_state_of_the_start_up_check_is_no_setting(tmp_path: Path, word: str) -> None:
    said = refusal(tmp_path, f"+{ROLLOUT}.custom.multiturn.{word}")
    assert said.startswith(f"{ROLLOUT}.custom.multiturn.derived=")
    assert said.endswith("the start-up check writes it, and everything after it believes it; leave it out")


def test_a_printed_command_is_told_of_a_setting_that_goes(tmp_path: Path) -> None:
    words = ["run", "quickstart", "--print", "--out", str(tmp_path / "out")]
    history = f"+{ROLLOUT}.custom.multiturn.proxy.history=sampled"
    done = CliRunner().invoke(app, [*words, history])
    assert done.exit_code == 0
    assert "proxy.history=sampled: sessions know no other history" in done.stderr
    assert "history" not in CliRunner().invoke(app, words).stderr


@pytest.mark.parametrize(
    "word",
    [
        f"{ROLLOUT}.custom.multiturn.derived.own_server=True",
        f"{ROLLOUT}.custom.multiturn.derived={{own_server: True}}",
        f"{ROLLOUT}.custom.multiturn={{derived: {{own_server: True}}}}",
        f"{ROLLOUT}.custom={{multiturn: {{derived: {{own_server: True}}}}}}",
    ],
)
def test_words_of_verls_own_command_are_no_state_of_the_start_up_check_either(word: str) -> None:
    from verl_multiturn.verl_bridge.startup.refusals.loops import check_derived
    from verl_multiturn.verl_bridge.startup.view import RunView

    saved = {"actor_rollout_ref": {"rollout": {"custom": {"multiturn": {"derived": {"own_server": True}}}}}}
    own = f"{ROLLOUT}.custom"
    for words in (
        [],
        [f"{own}.multiturn.max_tool_calls=3", f"+{own}={{multiturn: {{}}}}", f"~{own}.multiturn.derived"],
    ):
        check_derived(RunView(OmegaConf.create({**saved, "hydra": {"overrides": {"task": words}}})))
    with pytest.raises(ConfigError, match=f"^{re.escape(word)}: the start-up check writes it"):
        check_derived(RunView(OmegaConf.create({"hydra": {"overrides": {"task": ["trainer.x=1", f"++{word}"]}}})))
