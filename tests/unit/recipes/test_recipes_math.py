"""The recipes torl and retool: their rows, their conversion of public data, and their runs."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.recipe_scripts import RECIPES, composed, prepared, script
from tests.support.warm_python import light_python
from verl_multiturn import ConfigError
from verl_multiturn.rewards import aclose, compute_score
from verl_multiturn.tools.python import PythonTool

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@pytest.fixture
def sft(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "prepare_data", script("retool"))
    return script("retool", "prepare_sft")


@pytest.fixture
async def python() -> AsyncIterator[PythonTool]:
    tool = PythonTool({"timeout_s": 60, "pool": 1})
    await tool.create("c")
    yield tool
    await tool.release("c")
    await tool.aclose()


@pytest.fixture
async def score() -> AsyncIterator[Any]:
    async def of(row: dict[str, Any], texts: list[str]) -> float:
        calls = [
            [
                {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                for call in map(json.loads, CALL.findall(text))
            ]
            for text in texts
        ]
        info = {**row["extra_info"], "assistant_texts": texts, "assistant_calls": calls, "call_statuses": []}
        found = await compute_score(row["data_source"], "", row["reward_model"]["ground_truth"], info)
        return found["score"]

    yield of
    await aclose()


# The smoke rows.


@pytest.mark.parametrize(
    ("recipe", "tools", "source"),
    [("torl", "tools.yaml", "math_torl"), ("retool", "tools.yaml", "math_dapo"), ("tool_n1", None, "tool_n1")],
)
async def test_smoke_rows_fit_tools_and_reward(
    tmp_path: Path, score: Any, recipe: str, tools: str | None, source: str
) -> None:
    words = ["--tools", str(RECIPES / recipe / tools)] if tools else []
    splits = await asyncio.to_thread(prepared, recipe, tmp_path, "--smoke", *words)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 8, "test": 4}
    rows = [*splits["train"], *splits["test"]]
    assert {row["data_source"] for row in rows} == {source}
    assert len({row["prompt"][-1]["content"] for row in rows}) == 12
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        demonstration = row["extra_info"]["demonstration"]
        assert await score(row, demonstration) == 1.0
        assert await score(row, [*demonstration[:-1], other["extra_info"]["demonstration"][-1]]) == 0.0


async def test_the_code_of_demonstrations_prints_their_answers(python: PythonTool) -> None:
    for row in script("torl").smoke_rows(0, 12):
        code, answer = row["extra_info"]["demonstration"]
        block = re.fullmatch(r".*\n```python\n(.*)\n```\n```output", code, re.DOTALL)
        assert block is not None
        printed_text = (await python.execute("c", {"code": block[1]})).text
        assert answer == f"The sum is \\boxed{{{printed_text.strip()}}}."
    for row in script("retool").smoke_rows(0, 12):
        called, answer = row["extra_info"]["demonstration"]
        arguments = json.loads(CALL.findall(called)[0])["arguments"]
        printed_text = (await python.execute("c", arguments)).text
        assert answer == f"The remainder is \\boxed{{{printed_text.strip()}}}."


# Public data.

TORL = {
    "data_source": "",
    "prompt": [{"role": "system", "content": "A conversation."}, {"role": "user", "content": "What is 2^{10}?"}],
    "ability": "math",
    "reward_model": {"ground_truth": "1024", "style": "rule"},
    "extra_info": {"split": "train", "id": 0},
}


@pytest.mark.parametrize(
    "entry",
    [
        TORL,
        {"question": "What is 2^{10}?", "final_answer": "1024", "difficulty": 2.0, "topic": "Algebra"},
        {"problem": "What is 2^{10}?", "answer": "1024", "solution": "…"},
        {"ID": "2024-I-1", "Problem": "What is 2^{10}?", "Solution": "…", "Answer": 1024},
        [
            {"from": "human", "value": "What is 2^{10}?"},
            {"from": "assistant", "ground_truth": {"value": "1024"}},
        ],
        {
            "0": {"from": "human", "value": "What is 2^{10}?"},
            "1": {"from": "assistant", "ground_truth": {"value": "1024"}},
        },
    ],
)
def test_torl_reads_the_forms_of_its_data_sets(entry: Any) -> None:
    torl = script("torl")
    row = torl.row(*torl.problem_of(entry))
    assert row["prompt"] == [
        {"role": "system", "content": torl.SYSTEM},
        {"role": "user", "content": "What is 2^{10}?"},
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1024"}


@pytest.mark.parametrize("entry", [{"text": "2"}, "2", [], [{"value": "q"}, {"value": "a"}]])
def test_torl_refuses_other_forms(entry: Any) -> None:
    with pytest.raises(ConfigError, match=r"a row of the source is .*; expected prompt and reward_model"):
        script("torl").problem_of(entry)


def test_torl_reads_a_folder_by_its_address_and_validation_sets(tmp_path: Path) -> None:
    def entry(problem: str) -> dict[str, Any]:
        return {**TORL, "prompt": [{"role": "user", "content": problem}]}

    # One problem occurs twice in a split, and one occurs in both splits.
    for split, problems in (("train", "abbc"), ("test", "cdd")):
        pyarrow.parquet.write_table(pa.Table.from_pylist([*map(entry, problems)]), tmp_path / f"{split}.parquet")
    (tmp_path / "AIME_2024.jsonl").write_text('{"Problem": "a", "Answer": 7}\n{"Problem": "q", "Answer": 8}\n')

    def problems_of(splits: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
        return {split: "".join(row["prompt"][-1]["content"][-1] for row in rows) for split, rows in splits.items()}

    splits = prepared("torl", tmp_path / "out", "--source", tmp_path.as_uri())
    assert problems_of(splits) == {"train": "ab", "test": "cd"}
    validation = ["--validation", str(tmp_path / "AIME_2024.jsonl")]
    splits = prepared("torl", tmp_path / "out", "--source", str(tmp_path), *validation)
    assert problems_of(splits) == {"train": "bc", "test": "aq"}
    found = [(row["data_source"], row["reward_model"]["ground_truth"]) for row in splits["test"]]
    assert found == [("math/aime_2024", "7"), ("math/aime_2024", "8")]


def test_benchmarks_that_are_validated_together_keep_their_names(tmp_path: Path) -> None:
    names = ["aime24", "MATH-500", "aime24", "HuggingFaceH4/amc23", ""]
    tested = [
        {**TORL, "data_source": name, "prompt": [{"role": "user", "content": f"p{i // 2}"}]}
        for i, name in enumerate(names)
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist([TORL]), tmp_path / "train.parquet")
    pyarrow.parquet.write_table(pa.Table.from_pylist(tested), tmp_path / "test.parquet")
    found = prepared("torl", tmp_path / "torl", "--source", str(tmp_path))
    # A problem in two benchmarks counts in both.
    kept = ["math/aime24", "math/math_500", "math/aime24", "math/amc23", "math_torl"]
    assert [row["data_source"] for row in found["test"]] == kept
    assert {row["data_source"] for row in found["train"]} == {"math_torl"}
    words = ["--source", str(tmp_path / "train.parquet"), "--validation", str(tmp_path / "test.parquet")]
    assert [row["data_source"] for row in prepared("retool", tmp_path / "retool", *words)["test"]] == [
        *kept[:-1],
        "math/test",
    ]


def test_torl_asks_in_the_papers_words_for_a_template_without_turns(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "rows.jsonl").write_text('{"problem": "What is 1+1?", "answer": 2}\n{"problem": "q", "answer": 3}\n')
    row = prepared("torl", tmp_path / "out", "--source", str(tmp_path / "rows.jsonl"))["train"][0]
    assert row["prompt"][0]["role"] == "user"
    tokenizer: Any = AutoTokenizer.from_pretrained(RECIPES / "common" / "model")
    template = composed("torl").actor_rollout_ref.model.custom_chat_template
    text = tokenizer.apply_chat_template(row["prompt"], chat_template=template, tokenize=False)
    assert text == (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it.\n"
        "User: Please integrate natural language reasoning with programs to solve the problem above, and put your "
        "final answer within \\boxed{}.\n" + row["prompt"][0]["content"].rpartition("\n")[2] + "\nAssistant:"
    )
    assert composed("torl", "simpletir").actor_rollout_ref.model.custom_chat_template is None


def test_torl_holds_out_problems_and_no_copies_of_them(tmp_path: Path) -> None:
    entries = [{"problem": f"p{i % 50}", "answer": i % 50} for i in range(1000)]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, entries)))
    splits = prepared("torl", tmp_path / "out", "--source", str(tmp_path / "many.jsonl"), "--prompt", "chat")
    problems = {split: [row["prompt"][-1]["content"] for row in rows] for split, rows in splits.items()}
    assert sorted(problems["train"] + problems["test"]) == sorted(f"p{i}" for i in range(50))
    assert len(problems["test"]) == 2


@pytest.mark.parametrize("recipe", ["torl", "retool"])
def test_a_row_without_a_problem_or_answer_ends_it_with_one_line(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "p", "answer": null}\n{"problem": null, "answer": 1}\n')
    command = [light_python(), str(RECIPES / recipe / "prepare_data.py"), "--out", str(tmp_path / "out")]
    command += ["--source", str(tmp_path / "rows.jsonl")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "error: a row of the source has the problem 'p' and the answer None; expected texts\n"


def test_torl_says_when_an_address_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*; download train.parquet and test.parquet"):
        script("torl").read(tmp_path.as_uri())


DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nLet $x+y=3$.\n\nFind $2x+2y$.\n\nRemember "
    'to put your answer on its own line after "Answer:".'
)


def test_retool_keeps_the_bare_problem_of_dapo_once(tmp_path: Path) -> None:
    entry = {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "6", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b"},
    }
    pyarrow.parquet.write_table(pa.Table.from_pylist([entry] * 5), tmp_path / "dapo.parquet")
    (tmp_path / "aime_2025.jsonl").write_text('{"problem": "p", "answer": "70"}\n{"problem": "q", "answer": "80"}\n')
    words = ["--source", str(tmp_path / "dapo.parquet"), "--validation", str(tmp_path / "aime_2025.jsonl")]
    splits = prepared("retool", tmp_path / "out", *words)
    (row,) = splits["train"]
    assert row["prompt"][-1] == {"role": "user", "content": "Let $x+y=3$.\n\nFind $2x+2y$."}
    assert row["reward_model"]["ground_truth"] == "6"
    assert row["data_source"] == "math_dapo"
    assert [row["data_source"] for row in splits["test"]] == ["math/aime_2025", "math/aime_2025"]


@pytest.mark.parametrize("text", ["Solve the following math problem", "a\n\nb\n\nc", ""])
def test_other_problems_stay_as_they_are(text: str) -> None:
    assert script("retool").bare_problem(text) == text


# The cold start.

QUESTION = (
    "Solve the following problem step by step. You can write code.\n\n*user question:*\nAnswer the following Math "
    "Problem and put the answer in the format of \\boxed{answer}\n\nHow many primes are below 30?\n\n\nRemember to "
    "place the final answer in the last part using the format: \n<answer>\n\\boxed{'The final answer goes here.'}\n"
    "</answer>"
)
ANSWER = (
    "I count them.\n<code>\n```python\nfrom sympy import primepi\nprint(primepi(29))\n```\n</code>\n<interpreter>\n10\n"
    "</interpreter>\nOnce more.\n<code>\nprint(10)\n</code>\n<interpreter>\n10\n</interpreter>\nThere are ten.\n\n"
    "<answer>\n\\boxed{10}\n</answer>"
)


def call(code: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}]


def test_a_row_of_retool_sft_becomes_a_conversation(sft: ModuleType) -> None:
    entry = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}
    system, user, *rest = sft.messages_of(entry)
    assert system == {"role": "system", "content": script("retool").SYSTEM}
    assert user["role"] == "user"
    assert user["content"].startswith("Answer the following Math Problem")
    assert "<answer>" not in user["content"]
    assert rest == [
        {
            "role": "assistant",
            "content": "I count them.",
            "tool_calls": call("from sympy import primepi\nprint(primepi(29))"),
        },
        {"role": "tool", "content": "10"},
        {"role": "assistant", "content": "Once more.", "tool_calls": call("print(10)")},
        {"role": "tool", "content": "10"},
        {"role": "assistant", "content": "There are ten.\n\n\n\\boxed{10}"},
    ]


@pytest.mark.parametrize(
    "answer",
    [
        "No code. <answer>\\boxed{1}</answer>",
        "<code>1</code>\n<answer>\\boxed{1}</answer>",
        "<code>1</code><interpreter>1</interpreter>",
        "<code>1<code>2</code><interpreter>1</interpreter><answer>1</answer>",
        "<code>1</code><interpreter>1</interpreter> and <code>2</code><answer>1</answer>",
        "",
    ],
)
def test_sections_that_do_not_fit_are_left_out(sft: ModuleType, answer: str) -> None:
    entry = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]}
    assert sft.messages_of(entry) is None


def test_conversations_in_verls_form_stay(sft: ModuleType) -> None:
    messages = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": "a", "tool_calls": call("1")},
        {"role": "tool", "content": "1", "tool_calls": None},
        {"role": "assistant", "content": "1", "tool_calls": None},
    ]
    found = sft.messages_of({"messages": messages, "tools": []})
    assert found[0] == {"role": "system", "content": script("retool").SYSTEM}
    assert found[1:] == [{k: v for k, v in message.items() if v is not None} for message in messages]
    assert sft.messages_of({"messages": [*messages, {"role": "critic", "content": ""}]}) is None
    with pytest.raises(ConfigError, match=r"columns \['prompt'\]; expected messages"):
        sft.messages_of({"prompt": "q"})


def test_the_cold_start_of_a_smoke_run_takes_the_tiny_model() -> None:
    config = composed("retool/sft", smoke=True, overrides=["optim.lr=7"])
    assert config.model.path == str(RECIPES / "common" / "model")
    assert config.trainer.n_gpus_per_node == 1
    assert config.optim.lr == 7
