"""Ids built turn by turn equal those rendered at once, with real templates, real tokenizers and verl's own builders."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from verl_multiturn import load_tools

pytestmark = pytest.mark.stack

MODEL = ROOT / "recipes" / "quickstart" / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def test_a_model_of_texts_is_loaded_with_its_template_and_without_a_reader_of_images(tokenizer: Any) -> None:
    from verl_multiturn.chat.images import as_they_are
    from verl_multiturn.verl_bridge.model.loading import load_model

    loaded = load_model({"path": str(MODEL)}, "")
    assert (loaded.model_type, loaded.processor, loaded.read_images) == ("qwen2", None, as_they_are)
    assert loaded.template == tokenizer.chat_template
    own = load_model({"path": str(MODEL), "custom_chat_template": "{{ messages }}"}, "")
    assert own.template == "{{ messages }}"


def conversation() -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12 + 34"}}}
    return [
        {"role": "system", "content": "Be helpful."},
        {"role": "user", "content": "12 + 34 = ?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "46"},
        {"role": "tool", "content": "Error: sechsundvierzig"},
        {"role": "assistant", "content": "Answer: 46"},
    ]


# verl has no builder of its own for "llama", nor for SmolLM2: there the codec restores the separator.
@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_increments_add_up_to_the_whole(tokenizer: Any, model_type: str) -> None:
    from verl.utils.tokenizer.chat_template import initialize_turn_separator
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from verl_multiturn.chat.codec import ChatCodec

    builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type)
    separator = initialize_turn_separator(tokenizer) if model_type == "llama" else []
    codec = ChatCodec(builder, [tokenizer.eos_token_id], separator)
    schemas = [tool.tool_schema.as_dict() for tool in load_tools(ROOT / "tool_configs" / "calculator.yaml").values()]
    messages = conversation()

    ids = codec.initial(messages[:2], schemas)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 34"}}\n</tool_call>'
    ids += tokenizer.encode(f"{call}\n{call}<|im_end|>", add_special_tokens=False)
    increment = codec.observation(messages[:3], messages[3:5], ids, schemas)
    assert increment.separator == tokenizer.encode("\n", add_special_tokens=False)
    ids += increment.separator + increment.observation
    ids += tokenizer.encode("Answer: 46<|im_end|>", add_special_tokens=False)

    whole = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
    assert tokenizer.decode(ids) + "\n" == whole


def test_every_parser_format_can_be_made(tokenizer: Any) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.model.call_formats import known_formats, make_parser

    assert {"hermes", "chatml", "gpt-oss", "llama3", "mistral"} <= set(known_formats())
    assert make_parser("chatml", tokenizer, [2]) is not None
    with pytest.raises(ConfigError, match="unknown format 'nope'"):
        make_parser("nope", tokenizer, [2])


async def test_a_format_of_sglang(tokenizer: Any) -> None:
    from verl_multiturn.verl_bridge.model.call_formats import make_parser

    schemas = [tool.tool_schema.as_dict() for tool in load_tools(ROOT / "tool_configs" / "calculator.yaml").values()]
    parser = make_parser("llama3", tokenizer, [tokenizer.eos_token_id])
    text = '<|python_tag|>{"name": "calculator", "parameters": {"expression": "1 + 1"}}'
    turn = await parser.parse(tokenizer.encode(text + "<|im_end|>"), schemas, 0)
    (call,) = turn.calls
    assert (call.name, call.id) == ("calculator", "call_0_0")


def test_the_shipped_model_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(MODEL).iterdir()) < 4_000_000


def test_what_the_template_writes_before_a_turn(tokenizer: Any) -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    assert make_chat(tokenizer, "qwen2").generation_prompt == "<|im_start|>assistant\n"


def test_the_variables_of_the_template_reach_the_prompt(tokenizer: Any) -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    greeting = copy.deepcopy(tokenizer)
    greeting.chat_template = "{{ greeting }}" + greeting.chat_template
    messages = [{"role": "user", "content": "Q"}]
    plain, greeted = (make_chat(greeting, "qwen2", given).codec for given in ({}, {"greeting": "Good day. "}))
    prompt = greeting.decode(plain.initial(messages, []))
    assert greeting.decode(greeted.initial(messages, [])) == f"Good day. {prompt}"


def test_a_prompt_is_measured_with_its_tools(tokenizer: Any) -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import PromptMeasure
    from verl_multiturn.verl_bridge.model.loading import load_model

    tools = load_tools(ROOT / "tool_configs" / "calculator.yaml")
    schemas = [tool.tool_schema.as_dict() for tool in tools.values()]
    prompt = conversation()[:2]
    for tool_format, given, shown in (("hermes", tools, schemas), ("hermes", {}, []), ("tir", {}, [])):
        whole = tokenizer.apply_chat_template(
            prompt, tools=shown or None, add_generation_prompt=True, return_dict=False
        )
        model = load_model({"path": str(MODEL)}, "")
        assert PromptMeasure(model, given, tool_format)({"prompt": prompt}) == len(whole)


def test_a_prompt_without_a_user_is_measured_with_an_empty_message_of_one(tokenizer: Any) -> None:
    from verl_multiturn import Interaction
    from verl_multiturn.verl_bridge.model.chat_setup import PromptMeasure
    from verl_multiturn.verl_bridge.model.loading import load_model

    class Opening(Interaction):
        def reply(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    measure = PromptMeasure(load_model({"path": str(MODEL)}, ""), {}, interactions={"opening": Opening({})})
    system, user = conversation()[:2]
    for prompt, shown in (([system], [system, {"role": "user", "content": ""}]), ([system, user], [system, user])):
        whole = tokenizer.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
        assert measure({"prompt": prompt, "interaction_kwargs": {"name": "opening"}}) == len(whole)


def test_reasoning_that_the_template_leaves_out_of_a_prompt_is_counted() -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import PromptMeasure
    from verl_multiturn.verl_bridge.model.loading import load_model

    measure = PromptMeasure(load_model({"path": str(MODEL)}, ""), {})
    user = {"role": "user", "content": "Q"}
    counts = []
    for reasoning in ({}, {"reasoning_content": "Which one?"}, {"reasoning_content": "This one."}):
        measure({"prompt": [user, {"role": "assistant", "content": "A", **reasoning}, user]})
        counts.append(measure.reasoning_left_out)
    assert counts == [0, 1, 2]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.model.loading import load_model

    for model in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(
            ConfigError, match=rf"no tokenizer and config.json of '{model}' on this machine \(.*; mend it"
        ):
            load_model({"path": str(model)}, "mend it")
