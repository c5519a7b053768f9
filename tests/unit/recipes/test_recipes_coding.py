"""The recipe coding: the forms of its data sets, what is left out of them, and its settings beside AReaL's."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.recipe_scripts import RECIPES, composed, prepared, script
from tests.scoring import NO_ANSWER, RIGHT, WRONG, block, score
from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards import aclose

pytestmark = pytest.mark.slow

DOUBLE = "n = int(input())\nprint(2 * n)\nprint('end')"
DOUBLES = "def double(numbers):\n    return [2 * n for n in numbers]"
METHOD = "class Solution:\n    def double(self, numbers):\n        return [2 * n for n in numbers]"
IN_OUT = {"input": "4\n", "output": "8\nend\n"}
AS_LCB = {"input": "[1, 2]", "output": "[2, 4]", "testtype": "functional"}
AS_PRIME = {"type": "function_call", "fn_name": "double", "input": [[1, 2]], "output": [[2, 4]]}
NOT_JSON = "a call whose arguments or value are not JSON"
DEEP = "[" * 200_000 + "]" * 200_000
TOO_DEEP = "a value that is nested too deeply"
# For each form of the data sets a row, and a program that solves it.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "taco": ({"tests": json.dumps({"inputs": ["4\n", "5"], "outputs": ["8\nend", "10\nend\n"]})}, DOUBLE),
    "taco, lists of lines": ({"tests": {"inputs": [["4"]], "outputs": [["8", "end"]]}}, DOUBLE),
    "taco, a Python literal": ({"tests": str({"inputs": ["4\n"], "outputs": ["8\nend"]})}, DOUBLE),
    "taco, calls": (
        {"tests": json.dumps({"fn_name": "double", "inputs": [[[1, 2]]], "outputs": [[[2, 4]]]})},
        DOUBLES,
    ),
    "primeintellect": ({"tests": json.dumps([{"type": "stdin_stdout", **IN_OUT}])}, DOUBLE),
    "primeintellect, calls": ({"tests": json.dumps([AS_PRIME])}, DOUBLES),
    "lcbv5": (
        {"tests": json.dumps([{"testtype": "stdin", **IN_OUT}]), "metadata": {"func_name": None}, "starter_code": ""},
        DOUBLE,
    ),
    "lcbv5, calls": (
        {"tests": json.dumps([AS_LCB]), "metadata": {"func_name": "double"}, "starter_code": METHOD[:60]},
        METHOD,
    ),
    "lcbv5, metadata as text, and in the test": (
        {"tests": [{**AS_LCB, "metadata": '{"func_name": "double"}'}], "metadata": "{}"},
        METHOD,
    ),
    "codeforces": ({"tests": json.dumps([IN_OUT])}, DOUBLE),
    "areal": ({"input_output": json.dumps({"inputs": ["4\n"], "outputs": ["8\nend\n"], "fn_name": ""})}, DOUBLE),
    "areal, calls": (
        {
            "input_output": json.dumps({"inputs": ["[1, 2]"], "outputs": ["[2, 4]"]}),
            "metadata": {"fn_name": "double"},
            "language": "PYTHON",
        },
        DOUBLES,
    ),
}


@pytest.fixture(autouse=True)
async def _closed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(sys, "path", [str(RECIPES / "coding"), *sys.path])
    for module in ("problems", "sieve", "made_problems"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    yield
    await aclose()


def prepare_data() -> ModuleType:
    return script("coding")


@pytest.mark.parametrize("form", FORMS)
async def test_a_right_program_earns_1_in_every_form_and_others_0(form: str) -> None:
    entry, program = FORMS[form]
    _, row, counts = prepare_data().usable_row("taco", {"problem": "Double it.", **entry}, 15, 500_000)
    truth = json.loads(row["reward_model"]["ground_truth"])
    assert counts["kept"] == len(truth["inputs"]) > 0
    assert ("fn_name" in truth) == (program != DOUBLE)
    assert await score("taco", block(program), truth) == RIGHT
    assert await score("taco", block(program.replace("2 *", "3 *")), truth) == WRONG
    assert await score("taco", "It is easy.", truth) == NO_ANSWER
    if form in ("taco", "taco, calls"):
        assert await score("taco", block(""), truth) == WRONG


async def test_all_tests_or_none() -> None:
    options = composed("coding").reward.custom_reward_function.reward_kwargs.code
    assert options.partial_credit is False
    truth = {"inputs": ["1", "2", "3"], "outputs": ["2\nend", "4\nend", "7\nend"]}
    assert await score("taco", block(DOUBLE), truth, code={"partial_credit": False}) == WRONG


def test_the_prompt_has_the_statement_and_the_form_of_the_answer() -> None:
    prepare = prepare_data()

    def asked(form: str) -> str:
        row = prepare.usable_row("taco", {"problem": "Double it.", **FORMS[form][0]}, 15, 500_000)[1]
        (message,) = row["prompt"]
        assert message["role"] == "user"
        return str(message["content"])

    assert asked("taco") == f"Double it.\n\n{prepare.PROGRAM}"
    assert asked("primeintellect, calls") == f"Double it.\n\nWrite the Python function `double`. {prepare.BLOCK}"
    assert asked("lcbv5, calls") == f"Double it.\n\n{prepare.COMPLETE}\n```python\n{METHOD[:60].strip()}\n```"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"tests": [IN_OUT]}, "no statement"),
        ({"problem": " \n", "tests": [IN_OUT]}, "no statement"),
        ({"problem": "p", "tests": [IN_OUT], "language": "CPP"}, "another language than Python"),
        ({"problem": "p"}, "no tests"),
        ({"problem": "p", "tests": "[]"}, "no tests"),
        ({"problem": "p", "tests": '{"inputs": [], "outputs": []}'}, "no tests"),
        ({"problem": "p", "tests": "assert f(1)"}, "tests that are neither JSON nor Python"),
        ({"problem": "p", "tests": '{"inputs": ["1"], "outputs": []}'}, "not as many outputs as inputs"),
        ({"problem": "p", "tests": [{"input": "1"}]}, "a test without an input or an output"),
        ({"problem": "p", "tests": [{"input": {"a": 1}, "output": "1"}]}, "an input or output that is not text"),
        ({"problem": "p", "tests": [{**IN_OUT, "type": "stdin_stdout"}, AS_PRIME]}, "tests of several kinds"),
        ({"problem": "p", "tests": [AS_PRIME, {**AS_PRIME, "fn_name": "other"}]}, "tests of several kinds"),
        (
            {"problem": "p", "tests": [AS_LCB, {**IN_OUT, "testtype": "stdin"}], "metadata": {"func_name": "f"}},
            "tests of several kinds",
        ),
        ({"problem": "p", "tests": [{**IN_OUT, "type": "interactive"}]}, "tests of an unknown kind"),
        ({"problem": "p", "tests": [AS_LCB]}, "calls of a function without a name"),
        ({"problem": "p", "tests": [{**AS_PRIME, "fn_name": "a.b"}]}, "calls of a function without a name"),
        ({"problem": "p", "tests": [{**AS_PRIME, "fn_name": "class"}]}, "calls of a function without a name"),
        ({"problem": "p", "tests": [{**AS_PRIME, "input": {"n": 1}}]}, "a call whose arguments are not a list"),
        (
            {"problem": "p", "tests": [{**AS_LCB, "input": "NaN"}], "metadata": {"func_name": "f"}},
            NOT_JSON,
        ),
        ({"problem": "p", "tests": json.dumps([{**AS_PRIME, "input": [float("inf")]}])}, NOT_JSON),
        ({"problem": "p", "tests": [{"input": "\ud800", "output": "1"}]}, "text that is not Unicode"),
        ({"problem": "\ud800", "tests": [IN_OUT]}, "text that is not Unicode"),
        ({"problem": "p", "tests": [{**AS_PRIME, "input": [[0] * 20_000]}]}, "no test that is short enough"),
        ({"problem": "p", "tests": [AS_LCB], "metadata": DEEP}, TOO_DEEP),
        ({"problem": "p", "tests": [{**AS_LCB, "input": DEEP}], "metadata": {"func_name": "f"}}, TOO_DEEP),
        ([1], "a row that is no object"),
    ],
)
def test_what_cannot_be_scored_is_left_out_with_its_reason(entry: dict[str, Any], reason: str) -> None:
    rows, tallies = prepare_data().rows_of({"train": [], "test": [("taco", entry)]})
    assert rows["test"] == []
    assert tallies["test"].as_dict() == {"read": 1, "kept": 0, "left_out": {reason: 1}, "tests": {}}


def statement(start: int, words: int = 60) -> str:
    return " ".join(f"word{number}" for number in range(start, start + words))


def test_a_problem_counts_once_and_none_of_the_test_split_is_trained_on() -> None:
    framed = "Solve the following coding problem using the programming language python:\n\n{}\n\nThe input will be "
    framed += "stdin and you should print your solution to stdout\n\n\nNow solve the problem and return the code."
    tested = f"# A title\n{statement(1000)}\n\nInput: 1"
    train = [
        statement(0),
        framed.format(f"{statement(0)}\n"),
        f"-----{statement(0).upper()}-----",
        statement(40),  # shares 20 of its words with the first
        framed.format(statement(1000)),
        statement(1030),  # shares half of its words with a problem of the test split, and fewer of its runs
        statement(1010),
    ]
    found = {
        "train": [("primeintellect", {"problem": text, "tests": [IN_OUT]}) for text in train],
        "test": [("codeforces", {"problem": tested, "tests": [IN_OUT]})],
    }
    rows, tallies = prepare_data().rows_of(found)
    said = [row["prompt"][0]["content"].split("\n")[0] for row in rows["train"]]
    assert said == [statement(0), statement(40), statement(1030)]
    assert tallies["train"].as_dict() == {
        "read": 7,
        "kept": 3,
        "left_out": {"a problem that has come before": 2, "a problem of the test split": 2},
        "tests": {"kept": 3},
    }


def test_statements_without_latin_letters_are_different_problems() -> None:
    found = [
        ("taco", {"problem": text, "tests": [IN_OUT]})
        for text in ("两数之和", "三数之和", "n: сумма", "n: степень", "?!", "!")
    ]
    rows, _ = prepare_data().rows_of({"train": found, "test": []})
    assert len(rows["train"]) == 6


def test_the_longest_tests_are_kept_and_the_others_counted() -> None:
    tests = {"inputs": ["1" * size for size in (1, 30, 2, 400, 20)], "outputs": ["y"] * 5}
    entry = {"problem": "p", "tests": tests}
    prepare = prepare_data()

    def kept(most: int, most_characters: int) -> list[int]:
        _, row, counts = prepare.usable_row("taco", entry, most, most_characters)
        truth = json.loads(row["reward_model"]["ground_truth"])
        assert counts == {"kept": len(truth["inputs"]), "beyond the most tests or characters": 5 - counts["kept"]}
        return [len(given) for given in truth["inputs"]]

    assert kept(5, 1000) == [1, 30, 2, 400, 20]
    assert kept(2, 1000) == [30, 400]
    assert kept(2, 400) == [30, 20]  # the longest one does not fit
    assert kept(5, 52) == [30, 20]


def test_a_call_that_is_too_long_for_the_sandboxes_is_left_out_of_the_tests() -> None:
    tests = [AS_PRIME, {**AS_PRIME, "input": [[0] * 20_000], "output": [[0] * 20_000]}]
    _, row, counts = prepare_data().usable_row("primeintellect", {"problem": "p", "tests": tests}, 15, 500_000)
    assert json.loads(row["reward_model"]["ground_truth"])["inputs"] == [[[1, 2]]]
    assert +counts == {"kept": 1, "a call with too long arguments or value": 1}


def entry_of(form: str, number: int) -> dict[str, Any]:
    return {"problem": f"Problem {number}.", "solutions": ["x"], **FORMS[form][0]}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def test_a_downloaded_copy_of_deepcoders_data_is_read_with_all_its_files(tmp_path: Path) -> None:
    source = tmp_path / "deepcoder"
    for name, form in (("lcbv5", "lcbv5"), ("primeintellect", "primeintellect"), ("taco", "taco")):
        for shard in range(2):
            rows = [entry_of(form, len(name) * 100 + shard * 10 + i) for i in range(20)]
            write_parquet(source / name / f"train-0000{shard}-of-00002.parquet", rows)
    write_parquet(source / "lcbv5" / "test-00000-of-00001.parquet", [entry_of("lcbv5, calls", 9001)])
    write_parquet(source / "codeforces" / "test-00000-of-00001.parquet", [entry_of("codeforces", 9002)])
    found = prepared("coding", tmp_path / "out", "--source", str(source))
    assert [row["data_source"] for row in found["test"]] == ["livecodebench_v5", "codeforces"]
    counted = dict.fromkeys(("livecodebench_v5", "primeintellect", "taco"), 0)
    for row in found["train"]:
        counted[row["data_source"]] += 1
    assert counted == {"livecodebench_v5": 30, "primeintellect": 30, "taco": 30}  # numbers 10 to 19 came in both files
    (source / "codeforces" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(ConfigError, match="no file for the split 'test'"):
        prepared("coding", tmp_path / "out", "--source", str(source))


def test_ones_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(entry_of("areal", number)) for number in range(40)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    found = prepared("coding", tmp_path / "out", "--source", str(tmp_path / "mine.jsonl"))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 38, "test": 2}
    assert json.loads(capsys.readouterr().out.splitlines()[0])["test"]["kept"] == 2
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "train.jsonl").write_text("\n".join(lines[2:]))
    (tmp_path / "split" / "test.jsonl").write_text("\n".join(lines[:3]))
    found = prepared("coding", tmp_path / "out", "--source", str(tmp_path / "split"))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 37, "test": 3}
    assert {row["data_source"] for rows in found.values() for row in rows} == {"deepcoder"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mine.csv", "a,b", "expected one of .parquet, .jsonl"),
        ("mine.jsonl", "{", "cannot be read"),
        ("mine.parquet", "no parquet", "cannot be read"),
        ("mine.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS"),
        ("missing.jsonl", None, "no such file or folder"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        prepared("coding", tmp_path / "out", "--source", str(tmp_path / name))


def test_a_line_that_is_no_object_or_too_deep_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(entry_of("areal", number)) for number in range(3)]
    (tmp_path / "mine.jsonl").write_text("\n".join([*lines, "[1]", f'{{"problem": {DEEP}}}']))
    prepared("coding", tmp_path / "out", "--source", str(tmp_path / "mine.jsonl"))
    tallies = json.loads(capsys.readouterr().out.splitlines()[0])
    assert tallies["train"]["left_out"] == {"a row that is no object": 2}


async def test_the_made_problems_have_all_forms_and_programs_that_solve_them(tmp_path: Path) -> None:
    found = prepared("coding", tmp_path, "--smoke")
    assert {split: len(rows) for split, rows in found.items()} == {"train": 8, "test": 4}
    names = {"taco", "primeintellect", "livecodebench_v5", "codeforces"}
    assert {row["data_source"] for row in found["train"]} == names
    for row in found["train"][:5]:
        (said,) = row["extra_info"]["demonstration"]
        truth = json.loads(row["reward_model"]["ground_truth"])
        truth = {key: value[:1] if isinstance(value, list) else value for key, value in truth.items()}
        assert await score(row["data_source"], said, truth) == RIGHT
        assert await score(row["data_source"], said.replace("+", "-"), truth) == WRONG


def test_the_settings_are_areals() -> None:
    """Compare with `examples/configs/qwen3-code/8b.yaml` and `14b.yaml`, under the names of verl."""
    for variant, model, tensor, generation, training in (
        ("areal_8b", "Qwen/Qwen3-8B", 2, 20, 4),
        ("areal_14b", "Qwen/Qwen3-14B", 4, 40, 8),
    ):
        config = composed("coding", variant)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert config.actor_rollout_ref.model.path == model
        assert (rollout.tensor_model_parallel_size, rollout.nnodes, config.trainer.nnodes) == (
            tensor,
            generation,
            training,
        )
        assert config.trainer.v1.trainer_mode == "separate_async"
        multiturn = rollout.custom.multiturn
        assert (multiturn.max_staleness, multiturn.importance_weight) == (16, "truncated")
        assert config.algorithm.rollout_correction.rollout_is_threshold == "1e-9_5.0"
        assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (128, 128, 16)
        assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 27648)
        assert actor.ppo_max_token_len_per_gpu == 30720
        optim = actor.optim
        assert (optim.lr, optim.weight_decay, list(optim.betas)) == (2e-5, 0.05, [0.9, 0.95])
        assert (optim.override_optimizer_config.eps, optim.lr_warmup_steps_ratio) == (1e-5, 0.001)
        assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.2, 1e9)
        assert (actor.use_kl_loss, config.algorithm.use_kl_in_reward) == (False, False)
        assert (config.algorithm.adv_estimator, config.algorithm.gamma) == ("reinforce_plus_plus", 1.0)
        assert (rollout.temperature, rollout.top_p) == (1.0, 1.0)
        assert config.algorithm.filter_groups.enable
    megatron = composed("coding", "megatron").actor_rollout_ref.actor.optim
    assert megatron.override_optimizer_config == {"adam_eps": 1e-5}
