"""Scripted conversations with your own tools: you write the model's turns. No model, no GPU, neither verl nor torch.

    outcome = await scripted_rollout([lookup], [tool_call("lookup", {"key": "a"}), "It is 1."], "What is a?")
    assert outcome.calls[0].text == "1"

The loop, the codec with its firewall, the call parser and the life of the tools are the same as in a run. A tiny
tokenizer and a ChatML-like template (folder `tiny_chat`) and the Hermes format replace a model's own. So a prompt
has other tokens, and more of them, than with a real model.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.codec import ChatCodec, Message
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.messages import check_last_speaker, read_messages
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.rendering_check import RenderingCheck
from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.describe import show
from verl_multiturn.errors import ConfigError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.running.registry import check_kwargs, check_methods, default_name
from verl_multiturn.interactions.running.session import InteractionGate
from verl_multiturn.rollout.conversation import Conversation
from verl_multiturn.rollout.engines.scripted_engine import ScriptedEngine
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome, Request
from verl_multiturn.rollout.trajectory import Source
from verl_multiturn.tools.loading.kwargs import check_shown, tools_of_row
from verl_multiturn.tools.loading.registry import listed_tool
from verl_multiturn.tools.running.gate import Gate

if TYPE_CHECKING:
    import jinja2
    import tokenizers

_FOLDER = Path(__file__).parent / "tiny_chat"
_END, _HEADER = "<|im_end|>", "<|im_start|>assistant\n"
_LIMITS = Limits(
    prompt_length=8192,
    response_length=8192,
    max_malformed_turns=MultiTurnSettings.model_fields["max_malformed_turns"].default,
)


_ENDS = {
    StopReason.FINISHED: "finished after turn {} of {}",
    StopReason.ENVIRONMENT_DONE: "was ended by the interaction after turn {} of {}",
}
"""Ends after which no turn may remain; after a limit, turns may."""


async def scripted_rollout(
    tools: Mapping[str, Any] | Iterable[Any],
    turns: Sequence[str],
    prompt: str | Sequence[Message],
    *,
    tools_kwargs: Mapping[str, Any] | None = None,
    interaction: Interaction | None = None,
    interaction_kwargs: Mapping[str, Any] | None = None,
    limits: Limits = _LIMITS,
    tool_timeout_s: float = 60.0,
) -> Outcome:
    """Roll out one conversation in which the model writes `turns`.

    Args:
        tools: A mapping as `load_tools` returns it, or a list of tools and typed functions.
        turns: The model's text, turn by turn. `verl_multiturn.runs.data.tool_call` writes a call.
        prompt: The user's message, or all messages.
        tools_kwargs: Arguments for the tools' methods, as in a data row: by tool, then `create_kwargs`,
            `execute_kwargs` …, or `shown`
        interaction: A simulated user or environment, which answers turns without calls: an object of your class, or one
            of `load_interactions`. None: such a turn ends the conversation.
        interaction_kwargs: Arguments for its `start` and `reply`.
        limits: The limits. The default has verl's defaults (for example one call a turn, 256 characters of a tool
            response), 8,192 tokens each for prompt and response, and a run's default of `max_malformed_turns`. In your
            own `Limits`, a field that you leave out has the default of `Limits`: no limit of malformed turns.
        tool_timeout_s: Seconds that one call of one method of a tool or interaction may take.

    Returns:
        The outcome of the conversation.

    Raises:
        ConfigError: A mistake in the arguments; or the conversation needed more turns than the script has, or
            finished before all were used.
        ToolContractError: A tool broke the contract of `BaseTool`.
        InteractionContractError: The interaction broke the contract of `Interaction`.
    """
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(f"turns={show(turns)}: expected a list of texts; give one text for each turn")
    if not isinstance(limits, Limits):
        raise ConfigError(f"limits={show(limits)}: expected Limits(...); import it from verl_multiturn")
    messages = _messages(prompt)
    given = _by_name(tools)
    chosen, kwargs = tools_of_row({"tools_kwargs": tools_kwargs}, given, "scripted_rollout")
    if interaction is None:
        check_shown({"tools_kwargs": tools_kwargs}, "scripted_rollout")
    user, user_kwargs = _user(interaction, dict(interaction_kwargs or {}))
    check_last_speaker(messages, user is not None, "prompt")
    tokenizer = tiny_tokenizer()
    end = [tokenizer.eos_token_id]
    engine = ScriptedEngine([tokenizer.encode(turn + _END) for turn in turns])
    conversation = Conversation(
        engine,
        tiny_codec(tokenizer),
        JsonParser(tokenizer, end),
        limits,
        Gates(Gate, tool_timeout_s),
        RenderingCheck(tokenizer, {}, _HEADER, end),
        interactions=Gates(InteractionGate, tool_timeout_s),
    )
    outcome = await conversation.run(
        Request(uuid4().hex, messages, chosen, kwargs, interaction=user, interaction_kwargs=user_kwargs, row="prompt")
    )
    asked = len(engine.seen)
    if asked > len(turns):
        raise ConfigError(
            f"turns: the script has {len(turns)} turns, and one more was asked for after the message "
            f"{show(outcome.messages[-1]['content'])}; add it, or let `limits` end the conversation before it "
            "(max_assistant_turns)"
        )
    if asked < len(turns) and outcome.stop_reason in _ENDS:
        raise ConfigError(
            f"turns: the conversation {_ENDS[outcome.stop_reason].format(asked, len(turns))}; "
            f"leave {show(turns[asked], 100)} out, or write other turns before it"
        )
    return outcome


def _user(interaction: Any, kwargs: dict[str, Any]) -> tuple[Interaction | None, dict[str, Any]]:
    """Return the interaction, with a name, and its kwargs, checked as those of a data row."""
    if interaction is None:
        if kwargs:
            raise ConfigError(
                f"interaction_kwargs={show(kwargs)}: there is no `interaction`; give one, or leave them out"
            )
        return None, {}
    if not isinstance(interaction, Interaction):
        raise ConfigError(
            f"interaction={show(interaction)}: expected an object of a class that derives from Interaction; make one, "
            "or take one by its name from what `load_interactions` returns"
        )
    interaction.name = interaction.name or default_name(type(interaction))
    check_methods(interaction)
    check_kwargs(interaction, kwargs, "scripted_rollout")
    return interaction, kwargs


def _messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    listed = isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt)
    if not listed:
        raise ConfigError(f"prompt={show(prompt)}: expected a text or a list of messages; give one of them")
    return read_messages(prompt, "prompt")


def transcript(outcome: Outcome) -> list[tuple[Source, str]]:
    """Return a scripted conversation as `(source, text)` pairs, split where the tokens' source or the turn changes.

    Text of the source `SAMPLED` is trained.
    """
    tokenizer = tiny_tokenizer()
    written = outcome.trajectory
    parts = itertools.groupby(zip(written.sources, written.turn_ids, written.ids, strict=True), key=lambda one: one[:2])
    return [(source, tokenizer.decode([index for *_, index in part])) for (source, _), part in parts]


def _by_name(tools: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    if isinstance(tools, Mapping):
        return dict(tools)
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise ConfigError(f"tools={show(tools)}: expected what load_tools returns, or a list; write [tool]")
    named: dict[str, Any] = {}
    listed: Iterable[Any] = tools
    for tool in listed:
        made = listed_tool(tool, "tools")
        if made.name in named:
            raise ConfigError(f"the tool name {made.name!r} is used twice; rename one of them")
        named[made.name] = made
    return named


@functools.cache
def tiny_tokenizer() -> TinyTokenizer:
    """Return the tokenizer that ships with this package."""
    import jinja2.sandbox
    import tokenizers

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    template = (_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    return TinyTokenizer(
        tokenizers.Tokenizer.from_file(str(_FOLDER / "tokenizer.json")), environment.from_string(template)
    )


class TinyTokenizer:
    """The part of a Hugging Face tokenizer that a codec and its checks use, built on the library `tokenizers` alone.

    Args:
        tokenizer: The tokenizer of that library.
        template: The chat template.
    """

    unk_token = None

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: jinja2.Template) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.added_tokens_decoder: dict[int, Any] = dict(tokenizer.get_added_tokens_decoder())
        self.all_special_tokens = [token.content for token in self.added_tokens_decoder.values() if token.special]
        self.eos_token = _END
        self.eos_token_id = self.convert_tokens_to_ids(_END)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. The text of a control token becomes that token, as with any model's tokenizer."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """Return the id of a token.

        Raises:
            KeyError: There is no such token.
        """
        found = self._tokenizer.token_to_id(tokens)
        if found is None:
            raise KeyError(tokens)
        return int(found)

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Return the template's text for a conversation. Token ids are not made here.

        Args:
            conversation: The messages.
            kwargs: `tools` and `add_generation_prompt`, as for a Hugging Face tokenizer.
        """
        return self._template.render(messages=list(conversation), **kwargs)


@dataclass(frozen=True)
class _Merged:
    token_ids: list[int]
    inserted_token_ids: list[int]
    removed_prefix_token_count: int = 0


class TinyBuilder:
    """A `TokenBuilder` for templates that only append, such as the shipped one.

    Args:
        tokenizer: Renders and encodes the messages.
    """

    def __init__(self, tokenizer: TinyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._newline = tokenizer.encode("\n")

    def build_initial_tokens(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **images: Any
    ) -> list[int]:
        """Return the ids of a prompt, with the header of the assistant's turn at the end."""
        return self._tokenizer.encode(self._text(messages, tools, header=True))

    def write(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> str:
        """Return the template's text of a prompt."""
        return self._text(list(messages), list(schemas) or None, header=True)

    def merge_context_tokens(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> _Merged:
        """Return the ids so far, a line break if they end with the end token, and the ids of the new messages."""
        before = self._text(previous_messages, tools, header=False)
        whole = self._text(updated_messages, tools, header=True)
        ended = bool(runtime_token_ids) and runtime_token_ids[-1] == self._tokenizer.eos_token_id
        inserted = self._newline if ended else []
        added = self._tokenizer.encode(whole.removeprefix(before))
        return _Merged([*runtime_token_ids, *inserted, *added], list(inserted))

    def _text(self, messages: list[Message], tools: list[dict[str, Any]] | None, header: bool) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=header))


def tiny_codec(tokenizer: TinyTokenizer) -> ChatCodec:
    """Return the codec of the shipped template."""
    builder = TinyBuilder(tokenizer)
    end = [tokenizer.eos_token_id]
    return ChatCodec(builder, end, firewall=Firewall(tokenizer), tokenizer=tokenizer, write=builder.write)
