"""The named benchmarks pay right solutions of every set and nothing else, and are composed by their protocols."""

from pathlib import Path

import pytest

from tests.long.task_sets.eval_sets import run
from verl_multiturn.evaluation.benchmarks.protocol import benchmarks
from verl_multiturn.runs.benchmark import benchmark_options, plan_benchmark
from verl_multiturn.runs.compose import compose_run, resolved


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_right_solutions_are_paid_and_nothing_else() -> None:
    found = run()
    assert found["different"] == []
    assert {name: each["rows"] for name, each in found["sets"].items()} == dict.fromkeys(
        ["aime24", "aime25", "math500", "gsm8k", "livecodebench_v5", "codeforces", "bfcl", "tau2", "terminal"], 10
    )
    assert {each["reference"] for each in found["sets"].values()} == {1.0}
    assert {each["empty"] for each in found["sets"].values()} == {0.0}
    assert {each.get("wrong", 0.0) for each in found["sets"].values()} == {0.0}


@pytest.mark.long
@pytest.mark.parametrize("name", benchmarks())
def test_each_protocol_is_what_its_recipe_is_composed_to(name: str, tmp_path: Path) -> None:
    given = [] if name in ("bfcl", "tau2") else [tmp_path]
    options = benchmark_options(name, given, [], False, [])
    plan, named = plan_benchmark(options, tmp_path / "out")
    config = resolved(compose_run(plan))
    params = config["actor_rollout_ref"]["rollout"]["val_kwargs"]
    sampled = {key: params[key] for key in ("n", "temperature", "top_p")}
    assert named.departures({**sampled, "length": config["data"]["max_response_length"]}) == []
    assert params["do_sample"] == (options.protocol.temperature > 0)
    if len(options.protocol.split) > 1 and not given:
        names = [f"{tmp_path / 'out' / 'data'}/{split}.parquet" for split in ("train", "test")]
        assert config["data"]["val_files"] == names
    if name == "terminal":
        assert config["recipe"]["prepare"] == {"harbor": True, "test-count": 1}
        assert config["data"]["val_files"][0].endswith("/data/train.parquet")
    if name == "bfcl":
        ours = config["actor_rollout_ref"]["rollout"]["custom"]["multiturn"]
        assert ours["turn_length"] == 4096
        assert ours["interaction_config_path"].endswith("recipes/artist/users/all.yaml")
        assert plan.data == "base+miss_func+miss_param+long_context"
