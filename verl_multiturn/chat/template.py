"""Find out which rules of multi-turn training a chat template keeps, by rendering with it.

Each rule has one of three verdicts: kept; not kept, in a way that is known and harmless; or refused. A run is refused
if it would train on tokens that the model never saw, or if the model would never see a tool response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.chat.codec import ChatCodec, Message, assistant_message
from verl_multiturn.chat.images import stand_in
from verl_multiturn.chat.message_forms import said_is_shown
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS
from verl_multiturn.chat.parsing.turns import CallParser
from verl_multiturn.chat.rendering_check import UNEXPLAINED, RenderingCheck, RenderingDifference
from verl_multiturn.chat.template_rules import NO_USER_TURN, Rule, RuleEffect
from verl_multiturn.errors import ConfigError

# Words that no template writes on its own.
_SYSTEM, _USER, _NEXT, _ANSWER, _THOUGHT = "sysq7", "userq7", "nextq7", "answerq7", "thoughtq7"
_RESULTS = ("resultq7", "otherq7")
TOOL = "probe_tool"
_ARGUMENTS = {"word": "argq7", "count": 3}
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "A word."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["word", "count"],
        },
    },
}


@dataclass(frozen=True)
class Template:
    """A model's template, with everything that reads or writes it."""

    tokenizer: Any
    codec: ChatCodec
    check: RenderingCheck
    parser: CallParser
    end_ids: Sequence[int]
    generation_prompt: str


async def examine_template(template: Template, tools: bool = True, prompt_only: bool = False) -> list[Rule]:
    """Examine every rule, in the order of the table that `verl-multiturn doctor --model` prints.

    Args:
        template: The template to examine.
        tools: Whether the run calls tools. Otherwise the rules about tools are omitted.
        prompt_only: Whether the template writes only the prompt, as in text mode, where no turn follows another.
    """
    probe = _ProbeRendering(template, tools)
    rules = [probe.renders(), probe.system_prompt()]
    if rules[0].verdict is RuleEffect.REFUSED:
        return rules[:1]
    rules.append(said_is_shown(template.codec, template.tokenizer, tools and not prompt_only))
    if prompt_only:
        end = probe.end_token()
        if end.verdict is RuleEffect.REFUSED:
            end = Rule(
                end.name, RuleEffect.KNOWN, "the template does not; in text mode the model alone ends its message"
            )
        return [*rules, end, probe.generation_prompt()]
    rules += [probe.end_token(), probe.separator(), probe.generation_prompt(), probe.append_only()]
    if tools:
        rules += [probe.tools_shown(), probe.tool_role(), probe.parallel_results(), await probe.calls_read()]
    rules += [probe.reasoning_kept(), await probe.whole()]
    if template.codec.vision is not None:
        rules.append(await probe.whole("images in prompts and answers", _with_images))
    return rules


def _with_images(text: str) -> Any:
    """Return a content with two images, side by side, before the text."""
    return [*({"type": "image", "image": stand_in()} for _ in range(2)), {"type": "text", "text": text}]


def turn_text(template: Template, turn: Message) -> str | None:
    """Return the template's text for a first turn, with its end token; None when the template refuses the turn."""
    probe = _ProbeRendering(template, tools=False)
    return probe.written_turn(turn) if turn.get("tool_calls") else probe.written_answer(str(turn["content"]))


class _ProbeRendering:
    def __init__(self, template: Template, tools: bool) -> None:
        self._template = template
        self._tools = tools
        self._opening = self._first_prompt()

    def _first_prompt(self) -> list[Message]:
        """Return system and user message, or the user message alone if the template has no system message."""
        user: Message = {"role": "user", "content": _USER}
        system: Message = {"role": "system", "content": _SYSTEM}
        return [system, user] if _SYSTEM in (self._text([system, user]) or "") else [user]

    def _text(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> str | None:
        try:
            return self._template.check.whole(messages, schemas)
        except Exception:  # a template is other people's code and may raise anything
            return None

    def _calls(self, count: int, content: str = "") -> Message:
        call = {"type": "function", "function": {"name": TOOL, "arguments": _ARGUMENTS}}
        calls = [{"id": f"call_0_{index}", **call} for index in range(count)]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def _results(self, count: int) -> list[Message]:
        return [
            {"role": "tool", "content": _RESULTS[index], "tool_call_id": f"call_0_{index}", "name": TOOL}
            for index in range(count)
        ]

    def renders(self) -> Rule:
        """Check that the template renders a prompt at all."""
        name = "renders a prompt"
        try:
            text = self._template.tokenizer.decode(self._template.codec.rendered(self._opening, []))
        except Exception as error:  # from a template, or from a tokenizer that has none
            return Rule(name, RuleEffect.REFUSED, f"{type(error).__name__}: {error}"[:200])
        if _USER not in text:
            return Rule(name, RuleEffect.REFUSED, "the user's words are not in the prompt")
        return Rule(name, RuleEffect.KEPT, "")

    def system_prompt(self) -> Rule:
        """Check that the prompt holds the row's system message."""
        name = "system message rendered"
        if len(self._opening) == 1:
            return Rule(name, RuleEffect.KNOWN, "no system role: put the instructions into the user's message")
        if self._tools and _SYSTEM not in (self._text(self._opening, [SCHEMA]) or _SYSTEM):
            found = "the row's instructions are lost where there are tools: put them into the user's message"
            return Rule(name, RuleEffect.REFUSED, found)
        alone = self._text(self._opening[1:]) or ""
        head = alone.partition(_USER)[0]
        # More letters than the headers of Llama 3 have: the template writes a system message of its own.
        words = sum(character.isalpha() for character in head)
        if words > len("beginoftextstartheaderiduserendheaderidsystem"):
            return Rule(name, RuleEffect.KEPT, "a prompt without one gets the template's own")
        return Rule(name, RuleEffect.KEPT, "")

    def end_token(self) -> Rule:
        """Check that a turn ends with a token that the engine stops at."""
        name = "a turn ends with an end token"
        followed = [*self._opening, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        text = self._text(followed)
        if text is None or _ANSWER not in text:
            return Rule(name, RuleEffect.REFUSED, "an assistant's turn followed by a user's is not rendered")
        tail = text.partition(_ANSWER)[2].partition(_NEXT)[0]
        ends = [self._template.tokenizer.decode([index]) for index in self._template.end_ids]
        for end in ends:
            if end in tail:
                return Rule(name, RuleEffect.KEPT, end)
        alone = (self._text(followed[:-1]) or "").rpartition(_ANSWER)[2]
        for end in ends:
            if end in alone:
                return Rule(name, RuleEffect.KNOWN, f"{end}; in earlier turns the template writes another")
        return Rule(
            name,
            RuleEffect.REFUSED,
            f"the template ends a turn with {tail[:20]!r}, the model with {sorted(ends)}; the engine would not stop at "
            "the turn's end: mend eos_token_id in generation_config.json",
        )

    def separator(self) -> Rule:
        """Check the text between the end token and the next message. The model does not sample it."""
        ids = self._turn_ids()
        increment = self._observe(ids, [{"role": "user", "content": _NEXT}])
        if isinstance(increment, str):
            return Rule("separator after the end token", RuleEffect.KNOWN, f"{NO_USER_TURN}: {increment}")
        text = self._template.tokenizer.decode(increment[0])
        return Rule("separator after the end token", RuleEffect.KEPT, f"{text!r}, restored" if text else "none")

    def generation_prompt(self) -> Rule:
        """Report the text after which the model begins."""
        return Rule("generation prompt", RuleEffect.KEPT, repr(self._template.generation_prompt))

    def append_only(self) -> Rule:
        """Check that a longer conversation begins with the shorter one."""
        name = "append-only"
        short = self._text([*self._opening, {"role": "assistant", "content": _ANSWER}])
        user = self._text(
            [*self._opening, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        )
        if short is None or user is None:
            return Rule(name, RuleEffect.KNOWN, "an assistant's turn alone is not rendered")
        if user.startswith(short) or user.startswith(short.rstrip()):
            return Rule(name, RuleEffect.KEPT, "")
        head = short.partition(_ANSWER)[0]
        if user.startswith(head):
            return Rule(name, RuleEffect.KNOWN, "the last turn ends otherwise than earlier ones")
        return Rule(name, RuleEffect.KNOWN, "earlier turns are rendered anew; the rollout keeps what the model saw")

    def tools_shown(self) -> Rule:
        """Check that the prompt shows the tools to the model."""
        text = self._text(self._opening, [SCHEMA]) or ""
        if TOOL in text:
            return Rule("tool schemas in the prompt", RuleEffect.KEPT, "")
        return Rule(
            "tool schemas in the prompt", RuleEffect.KNOWN, "not shown: describe the tools in the system message"
        )

    def tool_role(self) -> Rule:
        """Check that a tool response reaches the model."""
        name = "tool role rendered"
        increment = self._observe(self._turn_ids(), self._results(1))
        if isinstance(increment, str):
            return Rule(name, RuleEffect.REFUSED, increment)
        text = self._template.tokenizer.decode(increment[1])
        if _RESULTS[0] not in text:
            return Rule(name, RuleEffect.REFUSED, "a tool's answer is left out of the conversation")
        return Rule(name, RuleEffect.KEPT, repr(text.partition(_RESULTS[0])[0]))

    def parallel_results(self) -> Rule:
        """Check that the responses to several calls of a turn reach the model, in their order."""
        name = "parallel tool results"
        increment = self._observe(self._turn_ids(), self._results(2))
        if isinstance(increment, str):
            return Rule(name, RuleEffect.REFUSED, increment)
        text = self._template.tokenizer.decode(increment[1])
        places = [text.find(result) for result in _RESULTS]
        if min(places) < 0 or places != sorted(places):
            return Rule(name, RuleEffect.REFUSED, "the answers of two calls are not both shown in their order")
        if "\n".join(_RESULTS) in text:
            return Rule(
                name, RuleEffect.KNOWN, "the template takes one answer: several are joined into one, line by line"
            )
        if self._text([*self._opening, self._calls(2), *self._results(2)], [SCHEMA]) is None:
            return Rule(name, RuleEffect.KNOWN, "written turn by turn; the template itself refuses several calls")
        return Rule(name, RuleEffect.KEPT, "")

    def reasoning_kept(self) -> Rule:
        """Check that the template's rendering keeps the reasoning of earlier turns."""
        name = "earlier reasoning kept"
        thinking = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
        text = self._text([*self._opening, thinking, {"role": "user", "content": _NEXT}])
        if text is None:
            return Rule(name, RuleEffect.KNOWN, "a conversation with reasoning is not rendered")
        if _THOUGHT in text:
            return Rule(name, RuleEffect.KEPT, "")
        return Rule(
            name, RuleEffect.KNOWN, "stripped by the template; the rollout keeps what the model sampled and saw"
        )

    async def calls_read(self) -> Rule:
        """Check that the parser reads the calls that the template writes."""
        name = "the format reads the template's calls"
        text = self.written_turn(self._calls(1))
        if text is None or TOOL not in text:
            return Rule(
                name, RuleEffect.KNOWN, "the template writes no calls: tell the model how in the system message"
            )
        ids = self._template.codec.rendered(self._opening, [SCHEMA])
        message = await self._say(ids, [], text, 0)
        expected = [{"name": TOOL, "arguments": _ARGUMENTS}]
        if [call["function"] for call in message.get("tool_calls", [])] == expected:
            return Rule(name, RuleEffect.KEPT, "")
        return Rule(name, RuleEffect.REFUSED, f"rollout.multi_turn.format does not read {text[:120]!r}")

    async def whole(
        self, name: str = "turn by turn as the whole", content: Callable[[str], Any] = lambda text: text
    ) -> Rule:
        """Check that a conversation built turn by turn is the template's text of the whole.

        `content` makes the content of the user's and the tool's messages from their text.
        """
        template = self._template
        opening = [*self._opening[:-1], {"role": "user", "content": content(_USER)}]
        first = self.written_turn(self._calls(1))
        calls = first is not None and TOOL in first
        # A tool's images are examined even if the template writes no calls.
        as_tool = calls or (self._tools and content(_NEXT) != _NEXT)
        added: list[Message] = self._results(1) if as_tool else [{"role": "user", "content": _NEXT}]
        added = [{**message, "content": content(message["content"])} for message in added]
        try:
            ids = template.codec.rendered(opening, [SCHEMA])
        except ConfigError as error:
            return Rule(name, RuleEffect.REFUSED, str(error)[:300])
        sampled = [False] * len(ids)
        turn = await self._say(ids, sampled, first if calls else None, 0)
        increment = self._observe(ids, added, turn)
        if isinstance(increment, str):
            return Rule(name, RuleEffect.REFUSED if self._tools else RuleEffect.KNOWN, increment)
        ids += increment[0] + increment[1]
        sampled += [False] * (len(ids) - len(sampled))
        last = await self._say(ids, sampled, None, 1)
        differences = template.check.differences([*opening, turn, *added, last], [SCHEMA], ids, sampled)
        if not differences:
            return Rule(name, RuleEffect.KEPT, "the same tokens")
        listed = ", ".join(differences)
        if UNEXPLAINED & set(differences):
            return Rule(name, RuleEffect.REFUSED, f"unexplained difference: {listed}")
        harmless = {RenderingDifference.TOKENS, RenderingDifference.WHITESPACE}
        return Rule(name, RuleEffect.KEPT if set(differences) <= harmless else RuleEffect.KNOWN, f"differs in {listed}")

    async def _say(self, ids: list[int], sampled: list[bool], text: str | None, turn: int) -> Message:
        """Append a turn as the model would write it, by default an answer. Return the message that is read from it."""
        template = self._template
        text = self.written_answer(_ANSWER) if text is None else text
        before = ids[-16:]
        prompt = template.tokenizer.decode(before)
        for start, end in REASONING_MARKS:
            if prompt.rfind(start) > prompt.rfind(end) and end not in text:
                text = f"{_THOUGHT}\n{end}\n\n{text}"
        said = template.tokenizer.encode(text, add_special_tokens=False)
        ids += said
        sampled += [True] * len(said)
        return assistant_message(await template.parser.parse(said, [SCHEMA], turn, before))

    def _end_id(self) -> int:
        """Return the end token of a turn that is followed by a user message."""
        text = self._text(
            [*self._opening, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
        )
        tail = (text or "").partition(_ANSWER)[2].lstrip()
        tokenizer = self._template.tokenizer
        ends = [index for index in self._template.end_ids if tail.startswith(tokenizer.decode([index]))]
        return int(ends[0] if ends else self._template.end_ids[0])

    def written_turn(self, turn: Message) -> str | None:
        """Return the template's text for a turn after the end of the prompt, with the turn's end token.

        The turn is rendered in its place, and the text before and after it is removed:

            text    <prompt> | <the turn> | <header of the next message> marker …
            shared  ~~~~~~~~                                                 (the prompt, perhaps without its end)
            head                            ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~    (found in the increment of an observation)

        Args:
            turn: The assistant's message.

        Returns:
            The text; None where the template does not show the turn in its place.
        """
        prompt = self._template.tokenizer.decode(self._template.codec.rendered(self._opening, [SCHEMA]))
        added = self._results(1) if turn.get("tool_calls") else [{"role": "user", "content": _NEXT}]
        text = self._text([*self._opening, turn, *added], [SCHEMA])
        if text is None:
            return None
        # The template may leave an empty reasoning section out of earlier turns. The model would have written it.
        shared = prompt if text.startswith(prompt) else prompt[: len(prompt) - len(self._template.generation_prompt)]
        if not text.startswith(shared):
            return None
        increment = self._observe(self._turn_ids(), added, turn)
        if isinstance(increment, str):
            return None
        between = self._template.tokenizer.decode(increment[0] + increment[1])
        marker = _RESULTS[0] if turn.get("tool_calls") else _NEXT
        head = between.partition(marker)[0]
        turn_text, found, _ = text[len(shared) :].partition(head + marker)
        if not found:
            return None
        return turn_text if shared == prompt else self._after_header(turn_text)

    def written_answer(self, answer: str) -> str:
        """Return the template's text for a last turn, up to its end token."""
        prompt = self._template.tokenizer.decode(self._template.codec.rendered(self._opening, [SCHEMA]))
        text = self._text([*self._opening, {"role": "assistant", "content": answer}], [SCHEMA]) or ""
        shared = prompt if text.startswith(prompt) else prompt[: len(prompt) - len(self._template.generation_prompt)]
        if not text.startswith(shared):
            return answer
        said = text[len(shared) :] if shared == prompt else self._after_header(text[len(shared) :])
        head, _, tail = said.rpartition(answer)
        ends = [self._template.tokenizer.decode([index]) for index in self._template.end_ids]
        cut = min((tail.index(end) + len(end) for end in ends if end in tail), default=len(tail.rstrip()))
        return head + answer + tail[:cut]

    def _after_header(self, text: str) -> str:
        """Return a turn without the header and without an empty reasoning section that the template adds."""
        said = text.removeprefix(self._template.check.header)
        for start, end in REASONING_MARKS:
            if said.startswith(start) and not said[len(start) :].partition(end)[0].strip():
                return said.partition(end)[2].lstrip()
        return said

    def _turn_ids(self) -> list[int]:
        """Return the ids of the prompt and of a plain turn."""
        template = self._template
        ids = template.codec.rendered(self._opening, [SCHEMA])
        return ids + list(template.tokenizer.encode(_ANSWER, add_special_tokens=False)) + [self._end_id()]

    def _observe(
        self, ids: Sequence[int], added: Sequence[Message], turn: Message | None = None
    ) -> tuple[list[int], list[int]] | str:
        """Return the separator and the observation that follow a turn, or why there are none."""
        before = [*self._opening, turn or self._calls(len(added) if added[0]["role"] == "tool" else 0)]
        try:
            increment = self._template.codec.observation(before, list(added), ids, [SCHEMA])
        except ConfigError as error:
            return str(error)[:300]
        except Exception as error:  # from the template itself
            return f"the template raises {type(error).__name__}: {error}"[:300]
        return increment.separator, increment.observation
