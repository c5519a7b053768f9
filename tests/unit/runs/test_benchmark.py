"""An evaluation by name as a run of its recipe: options, words, and the words that leave the protocol."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli.main import app
from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.benchmark import benchmark_options, plan_benchmark
from verl_multiturn.runs.compose import compose_run, resolved

pytestmark = pytest.mark.slow


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "expected one of --recipe and --benchmark, got neither; give exactly one"),
        (
            ["--recipe", "quickstart", "--benchmark", "gsm8k"],
            "expected one of --recipe and --benchmark, got --recipe 'quickstart' and --benchmark 'gsm8k'; give exactly",
        ),
        (["--benchmark", "gsm8"], "unknown benchmark 'gsm8'; did you mean 'gsm8k'? known are gsm8k, "),
        (
            ["--benchmark", "gsm8k"],
            "--benchmark gsm8k needs its rows, and nothing is fetched here; fetch test of op",
        ),
        (["--benchmark", "gsm8k", "--rows", "missing"], "--rows 'missing': there is no such file or folder; --b"),
        (["--benchmark", "gsm8k", "--rows", "a", "--rows", "b"], "gsm8k is read from one file or folder; name one"),
        (
            ["--benchmark", "gsm8k", "--rows", "a", "--smoke"],
            "--rows 'a': gsm8k makes its own rows with --smoke; le",
        ),
        (
            ["--benchmark", "bfcl", "--rows", "a"],
            "--rows 'a': bfcl has its rows from the package bfcl-eval; leave",
        ),
        (
            ["--benchmark", "gsm8k", "--rows", ".", "--set", "data.val_files=[other.parquet]"],
            "--set 'data.val_files=[other.parquet]': --benchmark gsm8k has its own rows, and sets data.val_files its",
        ),
        (
            ["--benchmark", "bfcl", "--set", "++data.train_files=x"],
            "itself; name it with --rows or another --ben",
        ),
        (
            ["--benchmark", "aime24", "--rows", ".", "--set", "recipe.prepare.benchmark=aime25"],
            "sets recipe.prepare.benchmark itself; name it with --rows or another --benchmark",
        ),
        (
            ["--benchmark", "aime24", "--rows", ".", "--set", "recipe.prepare={benchmark:aime25}"],
            "sets recipe.prepare.benchmark itself; name each of its keys",
        ),
        (
            ["--benchmark", "terminal"],
            "fetch https://github.com/harbor-framework/terminal-bench-2-1, and name the",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_at_once(words: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, ["eval", "model", *words])
    assert done.exit_code == 2
    assert problem in done.stderr


def test_the_words_of_a_user_come_last_and_those_that_change_something_are_named(rows: Path) -> None:
    changes = ["actor_rollout_ref.rollout.val_kwargs.n=2", "trainer.n_gpus_per_node=2", "mt.turn_length=64"]
    changes += ["data.train_batch_size=3", "data.filter_overlong_prompts=True", "+recipe.prepare.source=x"]
    plan, named = plan_benchmark(benchmark_options("gsm8k", [rows], [], False, changes), rows / "out")
    others = ("--set data.filter_overlong_prompts=True", "--set +recipe.prepare.source=x")
    assert named.words == ("--set mt.turn_length=64", *others)
    config = resolved(compose_run(plan))
    params = config["actor_rollout_ref"]["rollout"]["val_kwargs"]
    assert (params["n"], params["temperature"], params["top_p"], params["do_sample"]) == (2, 0.0, 1.0, False)
    assert config["data"]["max_response_length"] == 1024
    assert config["recipe"]["prepare"] == {"benchmark": "gsm8k", "source": "x"}
    assert plan.data == str(rows.resolve())
    assert config["data"]["val_files"] == str(rows / "out" / "data" / "test.parquet")


def test_a_smoke_run_and_another_variant_leave_the_protocol() -> None:
    plan, named = plan_benchmark(benchmark_options("tau2", [], ["retail"], True, []), Path("outputs/never"))
    assert named.words == ("--variant retail", "--smoke")
    assert plan.variants == ("retail",)
    with pytest.raises(ConfigError, match="unknown variant 'shop'; known are"):
        plan_benchmark(benchmark_options("tau2", [], ["shop"], True, []), Path("outputs/never"))
