"""The data of the cold start in verl's own SFT data set."""

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.conftest import ROOT
from tests.recipe_scripts import composed
from tests.support.warm_python import run_warm

pytestmark = pytest.mark.stack

RETOOL = ROOT / "recipes" / "retool"
MODEL = ROOT / "recipes" / "quickstart" / "model"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    run_warm(str(RETOOL / "prepare_sft.py"), "--smoke", "--out", str(folder)).check_returncode()
    return folder / "train.parquet"


def spans(ids: list[int], mask: list[int], tokenizer: Any) -> list[tuple[int, str]]:
    """Return each run of equal mask values with its text."""
    found: list[tuple[int, list[int]]] = []
    for token, value in zip(ids, mask, strict=True):
        if not found or found[-1][0] != value:
            found.append((value, []))
        found[-1][1].append(token)
    return [(value, tokenizer.decode(tokens)) for value, tokens in found]


def test_verl_learns_exactly_what_the_assistant_says(rows: Path) -> None:
    from transformers import AutoTokenizer
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    data = MultiTurnSFTDataset(str(rows), tokenizer, {"pad_mode": "no_padding", "max_length": 4096})
    assert len(data) == 8
    item = data[0]
    messages, tools = (pyarrow.parquet.read_table(rows).to_pylist()[0][key] for key in ("messages", "tools"))
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    # Nothing of the assistant's header is learned. The line break after its end token is, as always in verl.
    turns = [part.partition("<|im_end|>\n")[0] for part in whole.split("<|im_start|>assistant\n")[1:]]
    found = spans(item["input_ids"].tolist(), item["loss_mask"].tolist(), tokenizer)
    assert "".join(text for _, text in found) == whole
    assert [text for value, text in found if value] == [f"{turn}<|im_end|>\n" for turn in turns]
    assert turns == [
        "I compute the power modulo the divisor.\n<tool_call>\n"
        '{"name": "code_interpreter", "arguments": {"code": "print(pow(3, 20, 7))"}}\n</tool_call>',
        "The remainder is \\boxed{2}.",
    ]


def test_the_cold_start_has_the_prompt_of_the_recipes_own_rows(rows: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from verl_multiturn import load_tools

    run_warm(str(RETOOL / "prepare_data.py"), "--smoke", "--out", str(tmp_path)).check_returncode()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    schemas = [tool.tool_schema.as_dict() for tool in load_tools(RETOOL / "tools.yaml").values()]
    cold = pyarrow.parquet.read_table(rows).to_pylist()
    warm = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    for one, other in zip(cold, warm, strict=True):
        begun = tokenizer.apply_chat_template(
            other["prompt"], tools=schemas, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.apply_chat_template(one["messages"], tools=one["tools"], tokenize=False).startswith(begun)


def test_the_cold_starts_gpu_configuration_is_composed() -> None:
    from verl.utils.config import omega_conf_to_dataclass

    for variants, nodes in (([], 2), (["qwen2.5_7b"], 1)):
        config = composed("retool/sft", *variants)
        for part in ("engine", "optim", "checkpoint"):
            omega_conf_to_dataclass(config[part])
        assert config.trainer.nnodes == nodes
        assert config.data.max_length == 16384
        assert config.optim.lr == 1e-5
