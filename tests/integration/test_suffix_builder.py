"""A builder that tokenizes only the text after its prefix gives the ids that verl's own builder gives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from tests.support.families import family, names
from verl_multiturn.chat.encoding import SeamEncoder

pytestmark = pytest.mark.stack

TEXTS = [
    "42",
    "",
    " 42\n",
    "\u0338 begins with a mark that joins",
    "e\u0301 ﬁ ＜",
    "\n\n  two\tlines\n",
    "[/INST] <s> <b>",
    "答案",
]
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# Templates in which something else than an added token, or nothing at all, comes before a message.
OWN_WAY = {"deepseek-r1-distill", "gemma3", "phi3.5", "gemma4", "gpt-oss"}

Case = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def cases(text: str, number: int) -> list[Case]:
    """Return messages that may follow a turn: answers of tools, words of users, and both."""
    calls = [
        {"id": f"call{number:04}{index}", "type": "function", "function": {"name": name, "arguments": {}}}
        for index, name in enumerate(["f", "g"])
    ]
    answers = [
        {"role": "tool", "content": text, "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in calls
    ]
    asked = {"role": "user", "content": "x"}
    user = {"role": "user", "content": text}

    def called(count: int) -> list[dict[str, Any]]:
        return [asked, {"role": "assistant", "content": "", "tool_calls": calls[:count]}]

    return [
        (called(1), answers[:1]),
        (called(2), answers),
        (called(2), [*answers, user]),
        ([asked, {"role": "assistant", "content": "x"}], [user]),
        (
            [asked, {"role": "assistant", "content": "x"}],
            [{"role": "user", "content": [{"type": "text", "text": text}]}],
        ),
        ([asked, {"role": "assistant", "content": "x"}], [user, {"role": "assistant", "content": "y"}, user]),
    ]


def merged(builder: Any, case: Case, tools: Any = None) -> list[int] | str:
    """Return the ids that a builder appends, or the kind of its error."""
    before, added = case
    try:
        return list(builder.merge_context_tokens(before, [*before, *added], [5, 6], tools=tools).token_ids)
    except Exception as error:
        return type(error).__name__


def both(tokenizer: Any, model_type: str | None = "llama", **kwargs: Any) -> tuple[Any, Any]:
    """Return verl's builder, and the one of a run."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from verl_multiturn.verl_bridge.model.suffix_builder import suffix_builder

    verls = create_continuous_token_builder(tokenizer, hf_model_type=model_type, chat_template_kwargs=kwargs)
    return verls, suffix_builder(verls, SeamEncoder(tokenizer))


class Ways:
    """Counts how often verl's own way is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

        self.verls = 0
        way = ContinuousTokenBuilder.render_delta_token_id

        def counted(builder: Any, *given: Any, **named: Any) -> Any:
            self.verls += 1
            return way(builder, *given, **named)

        monkeypatch.setattr(ContinuousTokenBuilder, "render_delta_token_id", counted)


@pytest.mark.parametrize("name", names())
def test_the_ids_are_verls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = family(name)
    verls, ours = both(one.tokenizer, one.model_type)
    assert type(ours) is not type(verls)
    assert type(ours).__name__ == type(verls).__name__
    for number, text in enumerate(TEXTS):
        for case in cases(text, number):
            assert merged(ours, case) == merged(verls, case)
    assert merged(ours, cases("42", 0)[0], [SCHEMA]) == merged(verls, cases("42", 0)[0], [SCHEMA])
    ways = Ways(monkeypatch)
    merged(ours, cases("43", 0)[0])
    assert ways.verls == 0 or name in OWN_WAY


class Clock:
    """Text that a template may write at the head of a text: the time, or how often it was rendered."""

    def __init__(self, ticks: bool) -> None:
        self.ticks = ticks
        self.time = 1

    def now(self) -> int:
        self.time += self.ticks
        return self.time


CHATML = (
    "{{ clock.now() if clock else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(template: str = CHATML) -> Any:
    tokenizer = copy.copy(family("qwen2.5").tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_writes_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(ticks=False)
    verls, ours = both(chatml(), clock=clock)
    for time in (1, 1, 12, 2, 2):
        clock.time = time
        for case in cases(f"at {time}", 0):
            assert isinstance(merged(ours, case), list)
            assert merged(ours, case) == merged(verls, case)
    ways = Ways(monkeypatch)
    merged(ours, cases("again", 0)[0])
    assert ways.verls == 0


@pytest.mark.parametrize(
    ("template", "ticks"),
    [
        (CHATML, True),
        ("{{ messages | length }}" + CHATML, False),
        # No added token comes before a message: a text may merge with it.
        (CHATML.replace("<|im_start|>", "").replace("<|im_end|>", ""), False),
        (CHATML.replace("<|im_start|>{{ m.role }}\n", ""), False),
    ],
    ids=["each rendering differs", "messages are counted", "no control tokens", "a text begins a message"],
)
def test_a_prefix_that_is_none(template: str, ticks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    verls, ours = both(chatml(template), clock=Clock(ticks))
    for text in TEXTS:
        for case in cases(text, 0):
            assert merged(ours, case) == merged(verls, case)
    ways = Ways(monkeypatch)
    merged(ours, cases("42", 0)[0])
    assert ways.verls == 1


def small(change: Callable[[Tokenizer], None]) -> Any:
    """Return a tokenizer of bytes with ChatML's tokens, changed."""
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "u"), ("o", "k")]
    vocabulary = {token: index for index, token in enumerate([*characters, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    change(backend)
    tokens = [AddedToken(token, normalized=False) for token in ("<|im_end|>", "<|im_start|>")]
    backend.add_special_tokens([token for token in tokens if backend.token_to_id(token.content) is None])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def adds(*tokens: AddedToken) -> Callable[[Tokenizer], None]:
    def change(backend: Tokenizer) -> None:
        backend.add_tokens(list(tokens))

    return change


def normalizes(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.Replace(Regex("\n+<"), "<")
    backend.add_tokens([AddedToken("<|im_start|>", normalized=True)])


@pytest.mark.parametrize(
    ("change", "verls_way"),
    [
        (adds(), 0),
        (adds(AddedToken("\n<|im_start|>user", normalized=False)), 1),
        (adds(AddedToken("\n<|im", normalized=False)), 1),
        (adds(AddedToken("\n<", normalized=True)), 1),
        (adds(AddedToken("<|im_start|>", normalized=False, lstrip=True)), 1),
        (adds(AddedToken("<|im_start|>", normalized=False, single_word=True)), 1),
        (adds(AddedToken("<|im_start|>user", normalized=False, single_word=True)), 1),
        (adds(AddedToken("<|im_start|>", normalized=True)), 0),
        (adds(AddedToken("<|im_start|>", normalized=True), AddedToken(">u", normalized=False)), 1),
        (adds(AddedToken("<|im_start|>", normalized=True), AddedToken("im", normalized=False)), 1),
        (normalizes, 1),
    ],
    ids=[
        "plain",
        "over the boundary",
        "into it",
        "by a sign",
        "lstrip",
        "single_word",
        "longer",
        "second",
        "behind",
        "within",
        "normalized",
    ],
)
def test_tokens_that_go_over_the_boundary(
    change: Callable[[Tokenizer], None], verls_way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verls, ours = both(small(change), "llama", clock=None)
    for text in TEXTS:
        for case in cases(text, 0):
            assert merged(ours, case) == merged(verls, case)
    ways = Ways(monkeypatch)
    merged(ours, cases("ok", 0)[3])
    assert ways.verls == verls_way


def test_a_tokenizer_that_is_no_wrapper_is_asked_itself() -> None:
    from transformers import PreTrainedTokenizerFast

    class Odd(PreTrainedTokenizerFast):
        """Looks at the text before."""

        def _encode_plus(self, text: Any, **named: Any) -> Any:
            long = isinstance(text, str) and text.count("<|im_start|>") > 3
            return super()._encode_plus(text.replace("zz", "z") if long else text, **named)

    plain = small(adds())
    tokenizer = Odd(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    verls, ours = both(tokenizer, "llama", clock=None)
    assert ours is verls
    assert merged(ours, cases("zz", 0)[0]) != merged(both(plain, "llama", clock=None)[1], cases("zz", 0)[0])


def test_settings_of_another_caller_do_not_stay() -> None:
    verls, ours = both(chatml(), "qwen2", clock=None)
    case = cases("a long answer of <|im_end|> words", 0)[0]
    right = merged(verls, case)
    assert merged(ours, case) == merged(ours, case) == right
    for setting in ({"truncation": True, "max_length": 3}, {"padding": "max_length", "max_length": 99}):
        ours.tokenizer("some words of somebody else's", **setting)
        assert merged(ours, case) == right
    ours.tokenizer("some words", split_special_tokens=True)
    assert merged(ours, case) == right


@pytest.mark.parametrize(
    "given",
    [
        {"truncation": True, "max_length": 20},
        {"padding": "max_length", "max_length": 400},
        {"tokenizer_kwargs": {"split_special_tokens": True}},
    ],
)
def test_template_settings_that_change_the_ids_leave_verls_builder(given: dict[str, Any]) -> None:
    verls, ours = both(chatml(), "qwen2", **given)
    assert ours is verls


def test_a_builder_for_images_stays_as_it_is() -> None:
    from verl.utils.tokenizer.continuous_token import QwenVLContinuousTokenBuilder

    from verl_multiturn.verl_bridge.model.suffix_builder import suffix_builder

    builder = QwenVLContinuousTokenBuilder(family("qwen2.5").tokenizer, object())
    assert suffix_builder(builder, SeamEncoder(builder.tokenizer)) is builder
