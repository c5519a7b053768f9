"""Each family of the benchmarks is complete: its template renders, its end tokens are tokens, verl has a builder."""

import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import family, make_codec, names

pytestmark = pytest.mark.stack

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How many birds are 12 + 34 birds?"}]


@pytest.mark.parametrize("name", names())
def test_family(name: str) -> None:
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from verl_multiturn.verl_bridge.model.call_formats import known_formats

    one = family(name)
    tokenizer = one.tokenizer
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(ids)
    assert "Be kind." in text
    assert "How many birds are 12 + 34 birds?" in text
    for token in one.end_tokens:
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]
    assert (
        create_continuous_token_builder(tokenizer, hf_model_type=one.model_type).build_initial_tokens(MESSAGES) == ids
    )
    assert make_codec(one).initial(MESSAGES, []) == ids
    assert one.format is None or one.format in known_formats()


def test_the_builder_is_the_familys() -> None:
    """Gemma's own builder knows that the template goes on after a call with a token that opens the tool's answer."""
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    tokenizer = family("gemma4").tokenizer
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    history = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = [{"role": "tool", "content": "46", "tool_call_id": "c", "name": "f"}]
    codec = make_chat(tokenizer, "gemma4").codec
    ids = [*codec.initial(history[:1], []), tokenizer.convert_tokens_to_ids("<tool_call|>")]
    increment = codec.observation(history, answer, ids, [])
    assert tokenizer.decode(increment.separator) == "<|tool_response>"
    assert tokenizer.decode(increment.observation) == 'response:f{value:<|"|>46<|"|>}<tool_response|>'


def test_there_are_enough() -> None:
    families = [family(name) for name in names()]
    assert len(families) >= 18
    assert sum(one.format is not None for one in families) > 15
    assert len({one.tokenizer_source for one in families if one.real_tokenizer}) >= 5
    assert all(one.tokenizer.eos_token and one.tokenizer.pad_token for one in families)


def test_real_ids() -> None:
    def ids_of(name: str, *tokens: str) -> Any:
        return family(name).tokenizer.convert_tokens_to_ids(list(tokens))

    qwen = ids_of("qwen3", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<tool_response>", "</think>")
    assert qwen == [151643, 151644, 151645, 151657, 151665, 151668]
    assert ids_of("deepseek-v3", "<｜User｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>") == [128803, 128806, 128814]
    assert ids_of("mistral", "<s>", "[INST]", "[TOOL_CALLS]", "[ARGS]") == [1, 3, 9, 32]
    assert ids_of("smollm2", "<|endoftext|>", "<|im_start|>", "<|im_end|>") == [0, 1, 2]


def test_our_mistral_template_writes_what_mistral_writes() -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest, InstructRequest
    from mistral_common.tokens.tokenizers.base import TokenizerVersion
    from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV13
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = family("mistral").tokenizer
    path = distribution("mistral-common").locate_file("mistral_common/data/tekken_240911.json")
    tekken = json.loads(Path(str(path)).read_bytes())
    special = [{"rank": i, "token_str": tokenizer.convert_ids_to_tokens(i), "is_control": True} for i in range(1000)]
    split, version = tekken["config"]["pattern"], TokenizerVersion.v13
    theirs = InstructTokenizerV13(Tekkenizer(tekken["vocab"], special, split, 131_072, 1000, version))

    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]

    def conversation(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        calls = [{"id": "call00001", **call}, {"id": "call00002", **call}]
        return [
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "46 größer", "tool_call_id": "call00001"},
            {"role": "tool", "content": "今天", "tool_call_id": "call00002"},
            {"role": "assistant", "content": "46"},
            {"role": "user", "content": "Sure?"},
        ]

    request = ChatCompletionRequest.from_openai(conversation('{"a": 1}'), tools)
    instruct = InstructRequest(messages=request.messages, available_tools=request.tools)
    ours = tokenizer.apply_chat_template(conversation({"a": 1}), tools=tools, return_dict=False)
    assert ours == theirs.encode_instruct(instruct).tokens
