"""Protocols of benchmarks: the YAML files beside their table, names, and where an evaluation leaves one."""

import shutil
from pathlib import Path

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.benchmarks import protocol as module
from verl_multiturn.evaluation.benchmarks.protocol import (
    SINGLE_TURN,
    NamedBenchmark,
    benchmarks,
    cells,
    differing,
    is_compared,
    read_protocol,
)
from verl_multiturn.recipes import list_recipes
from verl_multiturn.rewards.router import find_reward

FOLDER = Path(module.__file__).parent
NAMES = ["aime24", "aime25", "math500", "gsm8k", "livecodebench_v5", "codeforces", "bfcl", "tau2", "terminal"]


def test_each_yaml_has_its_line_and_each_cell_its_value_and_source() -> None:
    assert benchmarks() == NAMES
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(NAMES)
    assert {name: differing(name) for name in NAMES} == {name: [] for name in NAMES}
    table = cells()
    for name in NAMES:
        assert {key for key, (value, source) in table[name].items() if value is not None and not source} == set()
        # A source is a page, a line or a part of a file; a choice of ours begins with that word.
        for key, (_, source) in table[name].items():
            assert not source or source.startswith("ours") or any(character in source for character in ",:/0123"), key


@pytest.mark.parametrize(
    ("old", "new"),
    [("temperature: 0.6", "temperature: 0.7"), ("size: 30\n", ""), ("n: 32", "n: 32\nvariants: [x]")],
)
def test_a_yaml_that_differs_from_the_table_is_found(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(FOLDER, tmp_path / "copied")
    text = (copied / "aime24.yaml").read_text(encoding="utf-8")
    assert old in text
    (copied / "aime24.yaml").write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(module, "_HERE", copied)
    assert differing("aime24") == [("variants" if "variants" in new else old.partition(":")[0])]
    assert differing("aime25") == []


def test_rewards_and_recipes_of_the_protocols_exist() -> None:
    for name in NAMES:
        protocol = read_protocol(name)
        if protocol.recipe == SINGLE_TURN:
            assert find_reward(name, {}) == protocol.reward
            prompts = protocol.prompt.values() if isinstance(protocol.prompt, dict) else [protocol.prompt]
            assert all("{question}" in str(prompt) for prompt in prompts)
        else:
            assert protocol.recipe in list_recipes()
            assert (protocol.reward, protocol.prompt) == ("recipe", None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nonsense", "unknown benchmark 'nonsense'; known are livecodebench_v5, "),
        ("AIME2024", "unknown benchmark 'AIME2024'; did you mean 'aime24'? known are aime24, aime25, "),
        ("lcb", "unknown benchmark 'lcb'; known are livecodebench_v5, bfcl, "),
    ],
)
def test_an_unknown_name_names_the_known_ones_and_the_nearest_first(given: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_protocol(given)
    assert str(refused.value).startswith(expected)
    assert sorted(str(refused.value).partition("known are ")[2].split(", ")) == sorted(NAMES)


def test_a_protocol_as_words_of_its_recipe() -> None:
    sampling = "actor_rollout_ref.rollout.val_kwargs"
    assert read_protocol("aime24").words("aime24", is_smoke=False) == [
        f"{sampling}.n=32",
        f"{sampling}.temperature=0.6",
        f"{sampling}.top_p=0.95",
        f"{sampling}.do_sample=True",
        "recipe.prepare.benchmark=aime24",
        "data.max_response_length=32768",
    ]
    assert read_protocol("terminal").words("terminal", is_smoke=True) == [
        f"{sampling}.n=4",
        f"{sampling}.temperature=0.6",
        f"{sampling}.top_p=0.95",
        f"{sampling}.do_sample=True",
        "+recipe.prepare.test-count=1",
        "data.val_files=[${recipe.out}/data/train.parquet,${recipe.out}/data/test.parquet]",
    ]
    assert f"{sampling}.do_sample=False" in read_protocol("gsm8k").words("gsm8k", is_smoke=False)


def test_the_departures_of_an_evaluation() -> None:
    named = NamedBenchmark("math500", read_protocol("math500"), ("--set mt.turn_length=512",))
    own = {"n": 4, "temperature": 0.6, "top_p": 0.95, "length": 32768, "size": 500}
    assert NamedBenchmark("math500", named.protocol).departures(own) == []
    assert named.departures({**own, "n": 1, "temperature": 0.0, "size": 16}) == [
        "n 1 in the place of 4",
        "temperature 0.0 in the place of 0.6",
        "rows 16 in the place of 500",
        "--set mt.turn_length=512",
    ]
    without_size = NamedBenchmark("codeforces", read_protocol("codeforces"))
    assert without_size.departures({"n": 8, "temperature": 1.0, "top_p": 0.95, "length": 32768, "size": 7}) == []
    assert [is_compared(word) for word in ("data.max_response_length=5", "+data.max_response_length=5", "a.b=1")] == [
        True,
        True,
        False,
    ]


def test_the_sentence_about_missing_rows_has_file_place_and_columns() -> None:
    assert read_protocol("math500").needed("math500") == (
        "--benchmark math500 needs its rows, and nothing is fetched here; fetch test of HuggingFaceH4/MATH-500 "
        "(with the columns problem, answer), and name the file or the folder with --rows"
    )
    assert read_protocol("terminal").is_fetched
    assert not read_protocol("tau2").is_fetched
