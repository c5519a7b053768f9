"""Conversations in text mode for tests: a tool that takes code, and tokens that are any pieces of text."""

from typing import Any

from tests.conftest import ROOT, CharBuilder, make_schema
from verl_multiturn import BaseTool, Conversation, Limits, Outcome, Request, ScriptedEngine, ToolResponse
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.control_tokens import Firewall
from verl_multiturn.chat.tir import STOP_PATTERN, TirCodec, TirParser
from verl_multiturn.rollout.engines.stop_texts import STOP_REGEX, StopTexts
from verl_multiturn.tools.running.gate import Gate

PROMPT = [80, 81, 62]  # P, Q and > of CharBuilder
END = 2  # <|im_end|>
STOPS = {STOP_REGEX: [STOP_PATTERN]}
BLOCK = "```python\nprint(6*7)\n```\n"
CALL = f"{BLOCK}```output"
# The same text in the quickstart's tokens: ` is 66, a newline is 201.
CALL_IDS = [66, 66, 66, 82, 91, 268, 259, 201, 326, 295, 86, 10, 24, 12, 25, 11, 201,
            66, 66, 66, 201, 66, 66, 66, 81, 87, 86, 82, 87, 86]  # fmt: skip
OUTPUT_IDS = [201, 22, 20, 201, 66, 66, 66, 201]  # "\n42\n```\n"
ANSWER = "It is \\boxed{42}."
ANSWER_IDS = [43, 86, 223, 75, 85, 223, 62, 68, 81, 90, 71, 70, 93, 22, 20, 95, 16, END]


class CodeTool(BaseTool):
    """A tool that answers every code with the same text, and remembers the codes."""

    def __init__(self, answer: str = "42", name: str = "run") -> None:
        super().__init__({}, make_schema(name, code="string"))
        self.answer = answer
        self.codes: list[str] = []

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        self.codes.append(parameters["code"])
        return ToolResponse(self.answer)


class Pieces:
    """A tokenizer whose tokens are any pieces of text. Its `encode` makes one token for each character."""

    def __init__(self) -> None:
        self.texts = ["<end>", *map(chr, range(1, 128))]

    def ids(self, *pieces: str) -> list[int]:
        self.texts += pieces
        return list(range(len(self.texts) - len(pieces), len(self.texts)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.ids(*text)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(self.texts[i] for i in token_ids)


def quickstart_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")


async def run(
    engine: Any,
    tokenizer: Any,
    *tools: BaseTool,
    end: int = END,
    firewall: Firewall | None = None,
    kwargs: dict[str, Any] | None = None,
    **limits: Any,
) -> Outcome:
    conversation = Conversation(
        StopTexts(engine, tokenizer),
        TirCodec(CharBuilder(), firewall, tokenizer),
        TirParser(tokenizer, [end]),
        Limits(**{"prompt_length": 100, "response_length": 900, **limits}),
        Gates(Gate, 60.0),
    )
    named = {tool.name: tool for tool in tools}
    request = Request("r1", [{"role": "user", "content": "Q"}], named, tools_kwargs=kwargs or {}, sampling=STOPS)
    return await conversation.run(request)


async def pieces(*turns: list[str], tool: CodeTool | None = None, **limits: Any) -> tuple[Outcome, str]:
    """Run a conversation whose turns are given piece by piece; an end token follows the last turn.

    Returns:
        The outcome, and the text of its response.
    """
    tokenizer = Pieces()
    script = [tokenizer.ids(*turn) for turn in turns]
    script[-1].append(0)
    outcome = await run(ScriptedEngine(script), tokenizer, tool or CodeTool(), end=0, **limits)
    return outcome, tokenizer.decode(outcome.trajectory.ids[len("PQ>") :])
