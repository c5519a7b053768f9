"""A file, folder or piece of code that a setting names is looked for before Ray, not minutes later by a worker."""

import contextlib
import copy
import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import yaml
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.integration.test_refusals import NO_NAME, RIGHT, ROLLOUT
from tests.support.warm_python import stack_python, variables
from tests.trainer_config import compose_config

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),  # verl's trainers are imported
]

MODEL = "actor_rollout_ref.model"
REWARD = "reward.custom_reward_function"
ROWS = [{"prompt": [{"role": "user", "content": "Q"}], "data_source": "d", "reward_model": {"ground_truth": "1"}}]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pd.DataFrame(ROWS).to_parquet(path)
    return str(path)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in an empty folder, without the settings of a platform."""
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    monkeypatch.chdir(tmp_path)


@functools.cache
def _right(rows: str) -> Any:
    data = {"data.train_files": rows, "data.val_files": rows, "ray_kwargs.ray_init.num_cpus": "64"}
    data |= {
        "data.train_batch_size": "1",
        "actor_rollout_ref.actor.use_dynamic_bsz": "True",
        "trainer.logger": "console",
    }
    settings = {**RIGHT, **data, "algorithm.adv_estimator": "grpo"}
    return compose_config([f"{key}={value}" for key, value in settings.items()])


def composed(rows: str, **changes: str) -> Any:
    """Return verl's configuration with right settings and these changes; composing it for each test would take long."""
    config = copy.deepcopy(_right(rows))
    for key, value in changes.items():
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return config


def started(config: Any) -> Any:
    """Run the start-up check as Hydra does, and return the configuration that verl then gets."""
    from verl_multiturn.verl_bridge.startup.configuration import StartUpCheck

    StartUpCheck().on_run_start(config)
    return config


def refused(config: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the start-up check on a configuration that it must refuse, and return its messages."""
    with pytest.raises(SystemExit) as ended:
        started(config)
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert said.count("verl-multiturn: ") == 1
    assert "Traceback" not in said
    return said.strip()


def test_what_is_right_starts_and_a_model_of_the_hub_is_no_path(rows: str, tmp_path: Path) -> None:
    started(composed(rows))
    config = started(composed(rows, **{f"{MODEL}.path": "Qwen/Qwen2.5-3B-Instruct"}))
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-3B-Instruct"
    config = started(composed(rows, **{f"{MODEL}.path": "'hdfs://host/a/model'"}))
    assert config.actor_rollout_ref.model.path == "hdfs://host/a/model"
    for files in ("hdfs://host/rows.parquet", str(Path(rows).parent / "*.parquet")):
        started(composed(rows, **{"data.train_files": f"'{files}'"}))


def test_an_evaluation_is_checked_as_a_training_is(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration
    from verl_multiturn.verl_bridge.startup.table import Section

    few = {"data.train_batch_size": "8", "actor_rollout_ref.actor.ppo_mini_batch_size": "8"}
    configuration.check_run(composed(rows, **few), is_training=False)  # which fills no batch
    with pytest.raises(ConfigError, match="fewer than the 8 of a batch"):
        configuration.check_run(composed(rows, **few))

    def refuse(run: Any) -> None:
        raise ConfigError(f"a new check of {run.value('trainer.logger')}")

    for table in ("VALUES", "FILES", "BEFORE_PLATFORM", "SETTINGS"):
        monkeypatch.setattr(configuration, table, [Section("New", [refuse])])
        for is_training in (True, False):
            with pytest.raises(ConfigError, match="a new check of console"):
                configuration.check_run(composed(rows), is_training)
        monkeypatch.setattr(configuration, table, [])


def test_a_model_path_is_one_that_transformers_can_open(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(ROOT / "recipes" / "quickstart" / "model", tmp_path / "m")
    for given in ("'~/m'", "./m", f"{tmp_path}/m/"):  # verl fails at `~`, and at a slash at the end
        config = started(composed(rows, **{f"{MODEL}.path": given}))
        assert config.actor_rollout_ref.model.path == str(tmp_path / "m")


def test_a_model_with_code_of_its_own_needs_its_own_setting_alone(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import model_end_ids
    from verl_multiturn.verl_bridge.model.loading import load_model

    folder = tmp_path / "m"
    shutil.copytree(ROOT / "recipes" / "quickstart" / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_model", "auto_map": {"AutoConfig": "own.OwnConfig"}, "eos_token_id": [2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    code = "from transformers import Qwen2Config\n\n\nclass OwnConfig(Qwen2Config):\n    model_type = 'own_model'\n"
    (folder / "own.py").write_text(code)
    tools = tmp_path / "tools.yaml"  # the name of a listed value, which a model could only write in other tokens
    tools.write_text(NO_NAME.replace("<tool_call>", "a/b"))
    changes = {f"{MODEL}.path": str(folder), f"{ROLLOUT}.multi_turn.tool_config_path": str(tools)}

    said = refused(composed(rows, **changes), capsys)
    assert f"the model '{folder}' has Python files of its own, which were not run; " in said
    assert "set actor_rollout_ref.model.trust_remote_code=true" in said
    started(composed(rows, **changes, **{f"{MODEL}.trust_remote_code": "true"}))
    model = load_model({"path": str(folder), "trust_remote_code": True}, "")
    assert (model.model_type, model_end_ids(model.tokenizer)) == ("own_model", [2, 3])


@pytest.mark.parametrize("given", ["/nowhere/model", "./model", "../model", "'~/model'", "models/a/b"])
def test_a_model_that_is_not_there(rows: str, capsys: pytest.CaptureFixture[str], given: str) -> None:
    said = refused(composed(rows, **{f"{MODEL}.path": given}), capsys)
    bare = given.strip("'")
    assert f"verl-multiturn: {MODEL}.path='{bare}': there is no such folder; expected" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{MODEL}.path": "null"}, f"{MODEL}.path=null: expected text"),
        ({f"{MODEL}.path": "''"}, f"{MODEL}.path='': expected the folder of a model"),
        ({f"{MODEL}.path": "{tmp}"}, "has no config.json"),
        ({f"{MODEL}.path": "{rows}"}, "is a file, expected the folder of a model"),
        ({f"{MODEL}.tokenizer_path": "/nowhere/t"}, f"{MODEL}.tokenizer_path='/nowhere/t': there is no such folder"),
        ({f"{MODEL}.hf_config_path": "/nowhere/c"}, f"{MODEL}.hf_config_path='/nowhere/c': there is no such folder"),
        ({f"{MODEL}.lora_adapter_path": "nowhere"}, f"{MODEL}.lora_adapter_path='nowhere': there is no such folder"),
        (
            {"critic.enable": "True", "critic.model.path": "/nowhere/c"},
            "critic.model.path='/nowhere/c': there is no such folder",
        ),
        (
            {
                "reward.reward_model.enable": "True",
                "reward.reward_model.enable_resource_pool": "True",
                "reward.reward_model.model_path": "/nowhere/r",
            },
            "reward.reward_model.model_path='/nowhere/r': there is no such folder",
        ),
        (
            {"reward_model.enable": "True", "reward_model.model.path": "/nowhere/r"},
            "reward_model.model.path='/nowhere/r': there is no such folder",
        ),
        ({f"{MODEL}.custom_chat_template": "t.jinja"}, "custom_chat_template='t.jinja': this is a path"),
        ({"data.train_files": "gone.parquet"}, "data.train_files: 'gone.parquet' is no file"),
        ({"data.val_files": "[{rows},gone.parquet]"}, "data.val_files: 'gone.parquet' is no file"),
        ({"data.val_files": "null"}, "data.val_files=null: expected text or a list"),
        ({"data.val_files": "'no/*.parquet'"}, "data.val_files: 'no/*.parquet' matches no file"),
        ({"data.train_files": "{tmp}/rows.csv"}, "expected a file that ends in .parquet, .json or .jsonl"),
        ({"data.train_files": "{tmp}/none.parquet"}, "none.parquet' has no rows"),
        ({"data.train_files": "{tmp}/none.jsonl"}, "none.jsonl' has no rows"),
        ({"data.train_files": "{tmp}/torn.parquet"}, "torn.parquet' cannot be read"),
        ({"trainer.resume_mode": "resum"}, "trainer.resume_mode='resum': expected one of"),
        (
            {"trainer.resume_mode": "resume_path"},
            "trainer.resume_from_path=None: expected the folder global_step_N of a checkpoint",
        ),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/nowhere/global_step_3"},
            "trainer.resume_from_path='/nowhere/global_step_3': there is no such folder",
        ),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{tmp}/global_step_4/"},
            "global_step_4/': expected the folder global_step_N of a checkpoint",
        ),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "{tmp}/global_step_4"},
            "has no folder 'actor'",
        ),
        (
            {"trainer.resume_from_path": "{tmp}/global_step_4"},
            "has no effect with trainer.resume_mode=auto; set trainer.resume_mode=resume_path",
        ),
        (
            {"trainer.save_freq": "2", "trainer.default_local_dir": "{tmp}/rows.csv/checkpoints"},
            "rows.csv/checkpoints' cannot be written",
        ),
        ({"trainer.rollout_data_dir": "{rows}"}, "trainer.rollout_data_dir="),
        ({f"{ROLLOUT}.custom.multiturn.record_dir": "{tmp}/rows.csv/r"}, "multiturn.record_dir="),
    ],
)
def test_paths_that_cannot_be_used(
    rows: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    (tmp_path / "rows.csv").write_text("prompt\nQ\n")
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "torn.parquet").write_bytes(Path(rows).read_bytes()[:100])
    (tmp_path / "global_step_4").mkdir()
    pd.DataFrame({"prompt": []}).to_parquet(tmp_path / "none.parquet")
    filled = {key: value.replace("{tmp}", str(tmp_path)).replace("{rows}", rows) for key, value in changes.items()}
    assert message in refused(composed(rows, **filled), capsys)


def test_a_pipe_is_no_data_file(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "pipe.jsonl' is no file" in refused(composed(rows, **{"data.train_files": "pipe.jsonl"}), capsys)


def test_a_data_set_of_ones_own_reads_what_it_likes(rows: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Own: ...\n")
    own = {"data.custom_cls.path": "own.py", "data.custom_cls.name": "Own", "data.train_files": "anything"}
    started(composed(rows, **own))


CODE = {
    "no_package.py": "import not_installed_package\ndef compute_score(): ...",
    "no_syntax.py": "def compute_score(:",
    "ends.py": "import sys\nsys.exit('no key')",
    "dies.py": "import os\nos.write(2, b'licence missing')\nos._exit(3)",
    "right.py": "import os\nprint('loud')\nos.environ['SEEN'] = '1'\ndef compute_score(**given): return 1.0",
    "number.py": "compute_score = 3",
    "takes.py": "def compute_score(data_source, solution_str, ground_truth, extra_info, *, length=1, weight=1): ...",
    "plain.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...",
    "text.txt": "def compute_score(): ...",
    "short_names.py": "def compute_score(data_source, solution, truth, extra): ...",
    "my_own_rewards.py": "RATE = 3\ndef reward(solution, ground_truth): ...\ndef wide(solution, truth, extra): ...",
    "my_broken_rewards.py": "import os\nos.environ['NO_SUCH_KEY']",
}
OURS = {f"{REWARD}.path": "'pkg://verl_multiturn.rewards'", f"{REWARD}.name": "compute_score"}


def routed(name: str) -> dict[str, str]:
    """Return the settings of a run with one route."""
    return {**OURS, f"{REWARD}.reward_kwargs": f"{{routes: {{'my/*': {name}}}}}"}


ROUTE = f"{REWARD}.reward_kwargs.routes['my/*']: "


@pytest.mark.usefixtures("imports_in_a_fork")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{REWARD}.path": "gone.py"}, f"{REWARD}.path='gone.py': there is no such file"),
        (
            {f"{REWARD}.path": "no_package.py"},
            f"{REWARD}.path='no_package.py': cannot be imported (ModuleNotFoundError: No module named "
            "'not_installed_package' (no_package.py:1)); install what it imports, set PYTHONPATH, or mend the file",
        ),
        ({f"{REWARD}.path": "no_syntax.py"}, "no_syntax.py': cannot be imported (SyntaxError"),
        ({f"{REWARD}.path": "ends.py"}, "ends.py': cannot be imported (SystemExit: no key"),
        (
            {f"{REWARD}.path": "dies.py"},
            "dies.py': cannot be imported (its process ended with exit status 3: licence missing)",
        ),
        ({f"{REWARD}.path": "number.py"}, f"{REWARD}.name='compute_score': expected a function, got 3"),
        (
            {f"{REWARD}.path": "takes.py", f"{REWARD}.reward_kwargs": "{weight: 2, lenght: 3}"},
            f"{REWARD}.reward_kwargs.lenght: the reward function takes length, weight, and not 'lenght'; did you mean "
            "'length'?",
        ),
        (
            {f"{REWARD}.path": "plain.py", f"{REWARD}.reward_kwargs": "{weight: 2}"},
            "takes data_source, solution_str, ground_truth, extra_info, and not 'weight'; correct the name",
        ),
        ({f"{REWARD}.path": "text.txt"}, "text.txt': cannot be imported (ImportError: no Python file"),
        (
            {f"{REWARD}.path": "right.py", f"{REWARD}.name": "compute_scor"},
            f"{REWARD}.name='compute_scor': 'right.py' has no 'compute_scor'; did you mean 'compute_score'?",
        ),
        ({f"{REWARD}.path": "right.py", f"{REWARD}.name": "null"}, f"{REWARD}.name=None: expected the name of"),
        ({f"{REWARD}.path": "'pkg://no.such.module'"}, f"{REWARD}.path='pkg://no.such.module': cannot be imported"),
        (
            {"custom_reward_function.path": "gone.py", "custom_reward_function.name": "f"},
            "custom_reward_function.path='gone.py': there is no such file",
        ),
        ({"data.custom_cls.path": "gone.py", "data.custom_cls.name": "Rows"}, "data.custom_cls.path='gone.py'"),
        (
            {"data.custom_cls.path": "right.py", "data.custom_cls.name": "compute_score"},
            "data.custom_cls.name='compute_score': expected a class, got",
        ),
        (
            {"trainer.v1.sampler.custom_sampler.path": "right.py", "trainer.v1.sampler.custom_sampler.name": "Sampler"},
            "trainer.v1.sampler.custom_sampler.name='Sampler': 'right.py' has no 'Sampler'",
        ),
        (
            {"trainer.v1.sampler.custom_sampler.name": "Sampler"},
            "trainer.v1.sampler.custom_sampler.path=None: expected",
        ),
        ({"reward.reward_manager.name": "niave"}, "reward.reward_manager.name='niave': did you mean 'naive'?"),
        ({"reward.reward_manager.name": "zzz"}, "reward.reward_manager.name='zzz': known are ["),
        ({"reward_model.reward_manager": "niave"}, "reward_model.reward_manager='niave': did you mean 'naive'?"),
        (
            {"reward.reward_manager.source": "importlib", "reward.reward_manager.module.path": "gone.py"},
            "reward.reward_manager.module.path='gone.py': there is no such file",
        ),
        ({"reward.reward_manager.source": "imporlib"}, "reward.reward_manager.source='imporlib': expected"),
        (
            {f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "no.such"},
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module='no.such': cannot be imported",
        ),
        ({f"{MODEL}.external_lib": "no_lib"}, f"{MODEL}.external_lib='no_lib': cannot be imported"),
        (
            {"trainer.checkpoint_callback_class": "json.Callback"},
            "trainer.checkpoint_callback_class='json.Callback': 'json' has no 'Callback'",
        ),
        ({"trainer.checkpoint_callback_class": "Callback"}, "'Callback': expected a dotted name"),
        ({f"{ROLLOUT}.agent.agent_loop_manager_class": "json.Manager"}, "agent_loop_manager_class='json.Manager'"),
        ({f"{ROLLOUT}.agent.agent_loop_config_path": "gone.yaml"}, "agent_loop_config_path='gone.yaml': there is no"),
        ({f"{ROLLOUT}.agent.agent_loop_config_path": "map.yaml"}, "map.yaml': expected a list of mappings"),
        (
            {f"{ROLLOUT}.agent.agent_loop_config_path": "loops.yaml"},
            "agent_loop_config_path='loops.yaml': _target_='json.Loop': 'json' has no 'Loop'",
        ),
        ({f"{ROLLOUT}.router_config_path": "gone.yaml"}, "router_config_path='gone.yaml': there is no such file"),
        (
            {f"{REWARD}.path": "short_names.py"},
            "short_names.py) cannot be called as verl calls it, with data_source=…, solution_str=…, ground_truth=…, "
            "extra_info=…: missing a required argument: 'solution'; it takes no 'solution_str' (did you "
            "mean 'solution'?); write it as def compute_score(data_source, solution_str, ground_truth, "
            "extra_info, **kwargs)",
        ),
        (
            routed("my_own_rewards.rewrad"),
            f"{ROUTE}'my_own_rewards' has no 'rewrad'; did you mean 'reward'?",
        ),
        (
            routed("my_own_rewardss.reward"),
            f"{ROUTE}cannot import 'my_own_rewardss' (ModuleNotFoundError: No module named 'my_own_rewardss'); did you "
            "mean 'my_own_rewards'? Otherwise install it, set PYTHONPATH, or start in the folder where it lies",
        ),
        (
            routed("my_broken_rewards.reward"),
            f"{ROUTE}cannot import 'my_broken_rewards' (KeyError: 'NO_SUCH_KEY' (my_broken_rewards.py:2)); install it",
        ),
        (routed("my_own_rewards.RATE"), f"{ROUTE}expected a function, but 'my_own_rewards.RATE' is 3; write it as def"),
        (
            routed("my_own_rewards.wide"),
            f"{ROUTE}'my_own_rewards.wide' cannot be called with (solution, ground_truth): missing a required "
            "argument: 'extra'; write it as def wide(solution, ground_truth)",
        ),
    ],
)
def test_code_that_cannot_be_used(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup.own_code import check_own_code
    from verl_multiturn.verl_bridge.startup.view import RunView

    for name, text in CODE.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))  # as a run's process has the folder in which it begins
    (tmp_path / "map.yaml").write_text("a: 1\n")
    (tmp_path / "loops.yaml").write_text("- {name: own, _target_: json.Loop}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_own_code(RunView(composed(rows, **changes)))


@pytest.mark.usefixtures("imports_in_a_fork")
def test_routes_that_can_be_used_are_shown(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.startup.own_code import check_own_code
    from verl_multiturn.verl_bridge.startup.plan_table import facts_of, lines_of
    from verl_multiturn.verl_bridge.startup.view import RunView

    (tmp_path / "my_own_rewards.py").write_text(CODE["my_own_rewards.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    check_own_code(RunView(composed(rows, **routed("my_own_rewards.reward"))))
    run = RunView(composed(rows, **routed("math")))
    check_own_code(run)
    facts = facts_of(run)
    assert facts["reward_routes"] == {"my/*": "math"}
    assert lines_of(facts)["reward"] == "pkg://verl_multiturn.rewards:compute_score (routes); my/*: math"


@pytest.mark.usefixtures("imports_in_a_fork")
def test_a_manager_of_ones_own_may_call_otherwise(rows: str, tmp_path: Path) -> None:
    from verl_multiturn.verl_bridge.startup.own_code import check_own_code
    from verl_multiturn.verl_bridge.startup.view import RunView

    (tmp_path / "short_names.py").write_text(CODE["short_names.py"] + "\nclass Manager: ...\n")
    own = {"reward.reward_manager.source": "importlib", "reward.reward_manager.name": "Manager"}
    own |= {"reward.reward_manager.module.path": "short_names.py", f"{REWARD}.path": "short_names.py"}
    check_own_code(RunView(composed(rows, **own)))


def test_the_code_is_imported_in_a_process_of_its_own(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its actions at import stay there: verl imports it in its workers, and the driver never does."""
    (tmp_path / "right.py").write_text(CODE["right.py"])
    started(composed(rows, **{f"{REWARD}.path": "right.py"}))
    assert "SEEN" not in os.environ
    assert "loud" not in capsys.readouterr().out


def test_the_code_is_imported_in_the_environment_of_the_workers(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "theirs.py").touch()
    (tmp_path / "own.py").write_text("import os, theirs\nos.environ['THEIR_KEY']\ndef compute_score(**given): pass")
    code = {f"{REWARD}.path": str(tmp_path / "own.py")}
    assert "cannot be imported" in refused(composed(rows, **code), capsys)
    place = "ray_kwargs.ray_init.runtime_env"
    started(composed(rows, **code, **{f"{place}.env_vars": f"{{THEIR_KEY: x, PYTHONPATH: '{tmp_path / 'lib'}'}}"}))
    started(composed(rows, **code, **{f"{place}.pip": "[theirs]"}))


def test_an_import_that_never_ends_is_not_waited_for(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may still be right: a model may be loaded at the import. So it goes on, and logs that."""
    from verl_multiturn.runs import imports

    monkeypatch.setattr(imports, "LONGEST_S", 0.5)
    (tmp_path / "slow.py").write_text("import threading\nthreading.Event().wait()\n")
    started(composed(rows, **{f"{REWARD}.path": "slow.py"}))
    assert f"{REWARD}.path='slow.py': its import takes longer than 0.5 s; it goes unchecked" in capsys.readouterr().err


def test_a_process_that_the_code_leaves_behind_is_ended(rows: str, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import subprocess, sys\n"
        "wait = 'import os, sys; os.write(1, b\"up\"); sys.stdin.read()'\n"
        "own = subprocess.Popen([sys.executable, '-c', wait], stdin=subprocess.PIPE)\n"
        "open('pid', 'w').write(str(own.pid))\n"
        "def compute_score(**given): return 1.0\n"
    )
    started(composed(rows, **{f"{REWARD}.path": "server.py"}))
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # it was killed, and may still be ending
            pass


def test_a_reward_file_may_register_its_own_manager(rows: str, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(CODE["right.py"])
    started(composed(rows, **{f"{REWARD}.path": "right.py", "reward.reward_manager.name": "of_my_own"}))


def test_a_run_ends_before_ray_with_the_same_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.runs.plan import plan_run
    from verl_multiturn.runs.run import run_recipe

    for name, value in {**variables(), "PYTHON": stack_python()}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "no_package.py").write_text(CODE["no_package.py"])
    out = tmp_path / "out"
    assert run_recipe(plan_run("quickstart", out=out, overrides=[f"{REWARD}.path=no_package.py"])) == 2
    said = f"verl-multiturn: {REWARD}.path='no_package.py': cannot be imported (ModuleNotFoundError: No module named"
    assert said in capfd.readouterr().out
    log = (out / "train.log").read_text()
    assert said in log
    assert "ray init kwargs" not in log
