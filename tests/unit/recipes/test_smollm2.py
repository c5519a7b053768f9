"""The SmolLM2 recipe: its rows, its expressions, the tokens that the warm start learns, and the report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT
from verl_multiturn.runs.data import write_rows
from verl_multiturn.tools.calculator import evaluate

RECIPE = ROOT / "recipes" / "smollm2"
sys.path.insert(0, str(RECIPE))


def load(name: str) -> Any:
    """Load a file of the recipe, under a module name that no other recipe's file has."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", RECIPE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look the module up there
    spec.loader.exec_module(module)
    return module


arithmetic, prepare_data, warm_start, report = (
    load(name) for name in ("arithmetic", "prepare_data", "warm_start", "report")
)


@pytest.mark.parametrize(
    ("tool", "system"),
    [
        (True, "Tool: calculator(expression). End with: Answer: <number>"),
        (False, "End with: Answer: <number>"),
    ],
)
def test_rows(tmp_path: Path, tool: bool, system: str) -> None:
    rows = prepare_data.make_rows(arithmetic.make_test_entries(), tool)
    write_rows(tmp_path, {"test": rows}, ROOT / "tool_configs" / "calculator.yaml" if tool else None)
    read = pd.read_parquet(tmp_path / "test.parquet").to_dict("records")
    first = read[0]
    assert [dict(message) for message in first["prompt"]] == [
        {"role": "system", "content": system},
        {"role": "user", "content": first["extra_info"]["question"].strip()},
    ]
    assert first["reward_model"] == {"ground_truth": first["extra_info"]["answer"], "style": "rule"}
    kinds = [row["data_source"].removeprefix("reasoning_gym/") for row in read]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(arithmetic.TASKS, 40)


def test_held_out_questions_are_in_no_training() -> None:
    test = {entry["question"] for entry in arithmetic.make_test_entries()}
    train = {entry["question"] for entry in arithmetic.make_train_entries(2000, 0)}
    warm = {entry["question"] for entry in arithmetic.make_warm_start_entries(640)}
    assert len(test) == 200
    assert len(train) > 1900
    assert not test & train
    assert not test & warm


def test_expressions_give_the_answer() -> None:
    for entry in arithmetic.make_test_entries():
        kind = entry["metadata"]["source_dataset"]
        answer = str(evaluate(arithmetic.make_expression(entry)))
        assert arithmetic.score_answer(kind, answer, entry["answer"]) == 1.0, entry["question"]


@pytest.mark.parametrize(
    ("metadata", "expression"),
    [
        ({"source_dataset": "chain_sum", "expression": "361 - 220"}, "361 - 220"),
        ({"source_dataset": "leg_counting", "animals": {"woodlouse": 5, "leech": 2}}, "5 * 14 + 2 * 0"),
        ({"source_dataset": "simple_equations", "equation": "33 - 98*e = -8199"}, "(-8199 - 33) // -98"),
        ({"source_dataset": "simple_equations", "equation": "4465*b = 178600"}, "178600 // 4465"),
    ],
)
def test_expression(metadata: dict[str, Any], expression: str) -> None:
    assert arithmetic.make_expression({"metadata": metadata}) == expression


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: -42", "-42"),
        ("Answer: 7\nAnswer: 42", "42"),
        ("Answer: 42 or 41", None),
        ("42", None),
        ("Answer: ", None),
        ("Answer: ٤٢", None),
    ],
)
def test_answer(text: str, answer: str | None) -> None:
    assert arithmetic.extract_answer(text) == answer


def test_what_the_warm_start_learns() -> None:
    """The warm start learns the assistant's words and end tokens, and nothing of the model's prompt."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    )
    metadata = {"source_dataset": "chain_sum", "expression": "1 + 1"}
    entry = {"question": "1 + 1 =", "answer": "2", "metadata": metadata}
    ids, mask = warm_start.encode(tokenizer, warm_start.conversation(entry, tool=True, call=True))
    runs: list[tuple[int, list[int]]] = []
    for token, learned in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != learned:
            runs.append((learned, []))
        runs[-1][1].append(token)
    assert [(learned, tokenizer.decode(part)) for learned, part in runs] == [
        (
            0,
            "<|im_start|>system\nTool: calculator(expression). End with: Answer: <number><|im_end|>\n"
            "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n",
        ),
        (1, '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call><|im_end|>'),
        (0, "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"),
        (1, "Answer: 2<|im_end|>"),
        (0, "\n"),
    ]


def test_report(tmp_path: Path) -> None:
    def validated(step: int, legs: float, sums: float) -> dict[str, Any]:
        kinds = {"leg_counting": legs, "chain_sum": sums}
        return {"step": step, "data": {f"val-core/reasoning_gym/{kind}/acc/mean@1": kinds[kind] for kind in kinds}}

    def record(step: int, validation: bool, said: str, *calls: str) -> dict[str, Any]:
        messages = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "1 + 1 ="))]
        messages.append({"role": "assistant", "content": said})
        return {"step": step, "validation": validation, "messages": messages, "calls": list(calls)}

    step = {
        "critic/score/mean": 0.25,
        "rollout/calls/per_trajectory/mean": 0.5,
        "training/rollout_probs_diff_mean": 1e-6,
        "training/rollout_probs_diff_max": 1e-5,
        "rollout/certificate/rows": 32,
        "rollout/certificate/violations": 0,
        "timing_s/step": 60.0,
    }
    last = validated(1, 0.5, 1.0)
    last["data"] |= step
    records = [
        record(0, True, "Answer: 3"),
        record(1, False, "Answer: 2", "call"),
        record(1, False, "Answer: 3", "call"),
        record(1, True, "Answer: 2", "call"),
        record(1, True, "2"),
    ]
    run = report.Run("calculator", 0, [validated(0, 0.0, 0.1), last], records, {"1 + 1 =": ("chain_sum", "2")})
    found = run.summary()
    assert (found["steps"], found["accuracy_before"], found["accuracy_after"]) == (1, 0.05, 0.75)
    assert found["accuracy_by_kind"] == {"leg_counting": [0.0, 0.5], "chain_sum": [0.1, 1.0]}
    assert found["greedy_before"] == {"called": 0.0, "right_when_called": 0.0, "right_when_not": 0.0}
    assert found["greedy_after"] == {"called": 0.5, "right_when_called": 1.0, "right_when_not": 0.0}
    assert found["sampled_last_3"] == {"called": 1.0, "right_when_called": 0.5, "right_when_not": 0.0}
    assert (found["certificate_rows"], found["certificate_violations"]) == (32, 0)
    report.plot(tmp_path / "curve.png", [run])
    assert (tmp_path / "curve.png").stat().st_size > 1000
