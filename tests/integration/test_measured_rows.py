"""verl's filter of long prompts measures the text that the model gets of a row."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support.families import family

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:torchtitan engine:UserWarning")]

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
USER = {"role": "user", "content": "Go."}
HISTORY = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "ok"}, USER]


def kept(folder: Path, name: str, prompts: list[Any]) -> list[int]:
    """Return the indexes of the rows that the filter keeps, of at most 400 tokens."""
    from verl_multiturn.verl_bridge.trainer.data_set import MeasuredRows

    file = folder / "rows.jsonl"
    rows = [{"prompt": prompt, "extra_info": {"index": index}} for index, prompt in enumerate(prompts)]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = {
        "max_prompt_length": 400,
        "filter_overlong_prompts": True,
        "filter_overlong_prompts_workers": None,
        "cache_dir": str(folder),
    }
    data = MeasuredRows(str(file), family(name).tokenizer, OmegaConf.create(config))
    assert data.tokenizer is family(name).tokenizer
    return [data[index]["extra_info"]["index"] for index in range(len(data))]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5-think"])
def test_blocks_are_measured_and_arguments_as_text_rendered(tmp_path: Path, name: str) -> None:
    """Qwen3's template renders text blocks as nothing, and Qwen3.5's refuses arguments that are text."""
    long, short = ([{"role": "user", "content": [{"type": "text", "text": "word " * n}]}] for n in (5000, 5))
    assert kept(tmp_path, name, [long, short]) == [1]
    assert kept(tmp_path, name, [HISTORY, HISTORY]) == [0, 1]


def test_a_row_that_cannot_be_rendered_stays_for_the_run_to_refuse(tmp_path: Path) -> None:
    nobody = [{"role": "assistant", "content": "Hello."}]
    assert kept(tmp_path, "qwen3.5-think", [nobody, [USER]]) == [0, 1]
