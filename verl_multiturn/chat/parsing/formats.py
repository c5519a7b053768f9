"""The tool-call formats, by name.

The parsers that come with inference engines are made for serving: they skip a call that they cannot read, and they
guess the type of an argument. Training needs more: the model must read an error for a call that cannot be read, and
an argument must be exactly the model's. So this module describes each format, and a few parsers of this package read
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_multiturn.chat.parsing.gemma import GemmaParser
from verl_multiturn.chat.parsing.harmony import HarmonyParser
from verl_multiturn.chat.parsing.json_calls import HERMES, JsonForm, JsonParser
from verl_multiturn.chat.parsing.llama import LlamaParser
from verl_multiturn.chat.parsing.pythonic import PythonForm, PythonParser
from verl_multiturn.chat.parsing.tags import TagForm, TagParser
from verl_multiturn.chat.parsing.turns import CallParser, ParserTokenizer


def _function_tags(tag: str, newline: str = r"\n?", escaped: bool = False) -> TagForm:
    """Describe the form `<function=name><parameter=key>value</parameter></function>` inside a tag.

    Models often forget the tag around it, so `<function=` alone begins a call, too.

    Args:
        tag: Name of the tag around a call, for example `tool_call`.
        newline: Regular expression for the template's text between a value and its tags.
        escaped: Whether values are escaped as in HTML.
    """
    return TagForm(
        begun=rf"<{tag}>(?:\s*<function=)?|<function=",
        close=f"</{tag}>",
        header=rf"(?:<{tag}>\s*)?<function=(?P<name>[\w.-]+)>",
        argument=rf"\s*<parameter=(?P<key>[^<>\n]+)>{newline}(?P<value>.*?){newline}</parameter>",
        end=rf"\s*</function>(?:\s*</{tag}>)?",
        opening=rf"<{tag}>|<function=|<parameter=",
        closing=rf"</{tag}>|</function>|</parameter>",
        written=f"<{tag}><function=name><parameter=key>value</parameter></function></{tag}>",
        escaped=escaped,
    )


def _value_tags(begun: str, header: str, end: str, written: str) -> TagForm:
    """Describe the form `name<arg_key>key</arg_key><arg_value>value</arg_value>` inside a tag."""
    return TagForm(
        begun=begun,
        close="</tool_call>",
        header=header,
        argument=r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        end=end,
        opening=r"<tool_call>|<arg_key>|<arg_value>",
        closing=r"</tool_call>|</arg_key>|</arg_value>",
        written=written,
    )


def _invoke_tags(section: str, mark: str, written: str) -> TagForm:
    """Describe the form `<invoke name="name"><parameter name="key">value</parameter></invoke>`.

    A section holds one such call or more.

    Args:
        section: Regular expression for the name of the section's tag.
        mark: Text before the name of each inner tag, or "". In a format with a mark, each parameter also declares
            whether its value is a string.
        written: Example of a call, shown to the model when a call cannot be read.
    """
    string = r'\s+string="(?P<string>true|false)"\s*' if mark else ""
    return TagForm(
        begun=rf"<{section}>(?:\s*<{mark}invoke\b)?|<{mark}invoke name=",
        close=f"</{mark}invoke>",
        header=rf'(?:<{section}>\s*)?<{mark}invoke\s+name="(?P<name>[\w.-]+)"\s*/?>',
        argument=rf'\s*<{mark}parameter\s+name="(?P<key>[^"]+)"{string}>(?P<value>.*?)</{mark}parameter>',
        end=rf"(?:(?<=/>)|\s*</{mark}invoke>)(?:\s*</{section}>)?",
        opening=rf"<{section}>|<{mark}invoke\s+name=|<{mark}parameter\s+name=",
        closing=rf"</{mark}invoke>|</{mark}parameter>",
        written=written,
    )


_CODER = _function_tags("tool_call")
_GLM = _value_tags(
    begun="<tool_call>",
    header=r"<tool_call>\s*(?P<name>[\w.-]+)",
    end=r"\s*</tool_call>",
    written="<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
)
_MINIMAX = _invoke_tags(
    "minimax:tool_call",
    "",
    '<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>',
)
_DSML = (
    '<｜DSML｜invoke name="name"><｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter></｜DSML｜invoke>'
)
_DEEPSEEK = _invoke_tags("｜DSML｜(?:function|tool)_calls", "｜DSML｜", _DSML)
_KIMI = JsonForm(
    begun=r"<\|tool_calls_section_begin\|>(?:\s*<\|tool_call_begin\|>)?|<\|tool_call_begin\|>",
    close="<|tool_call_end|>",
    header=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?"
    r"\s*<\|tool_call_argument_begin\|>\s*",
    end=r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    written="<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>",
)


def _deepseek(before_name: str, before: str, after: str, written: str) -> JsonForm:
    call = "<｜tool▁call▁begin｜>"
    return JsonForm(
        begun=rf"<｜tool▁calls▁begin｜>(?:\s*{call})?|{call}",
        close="<｜tool▁call▁end｜>",
        header=rf"(?:<｜tool▁calls▁begin｜>\s*)?{call}{before_name}(?P<name>[\w.-]+){before}",
        end=rf"{after}\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        written=written,
    )


# How an unmarked call begins, at the beginning of a turn. A JSON answer that is not a call begins in another way.
_LLAMA = r"""\{\s*["'](?:type["']\s*:\s*["']function["']\s*,\s*["'])?name["']\s*:"""

_FORMS: dict[str, JsonForm | TagForm | PythonForm] = {
    **dict.fromkeys(["hermes", "chatml", "qwen", "qwen25", "trinity"], HERMES),
    "interns1": JsonForm(
        begun=r"<\|action_start\|>",
        close="<|action_end|>",
        header=r"<\|action_start\|>\s*<\|plugin\|>\s*",
        end=r"\s*<\|action_end\|>",
        written='<|action_start|> <|plugin|>{"name": …, "parameters": {…}}<|action_end|>',
    ),
    "llama3": JsonForm(
        begun=rf"<\|python_tag\|>|(?:\A\s*|(?<=\}})[;\s]+)(?={_LLAMA})",
        close="",
        header=r"[;\s]*(?:<\|python_tag\|>\s*)?",
        end="",
        written='{"name": "…", "parameters": {…}}',
    ),
    "mistral": JsonForm(
        begun=r"\[TOOL_CALLS\]",
        close="",
        header=r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\][^\s\[\]{}]*)?\s*\[ARGS\]\s*)?",
        end="",
        written="[TOOL_CALLS]name[ARGS]{…}",
    ),
    "gigachat3": JsonForm(
        begun=r"(?:<\|message_sep\|>\s*)?function call<\|role_sep\|>|<\|function_call\|>",
        close="",
        header=r"(?:<\|message_sep\|>\s*)?(?:function call<\|role_sep\|>|<\|function_call\|>)\s*",
        end=r"(?:\s*</s>)?",
        written='<|function_call|>{"name": "…", "arguments": {…}}',
    ),
    **dict.fromkeys(["kimi", "kimi_k2"], _KIMI),
    "deepseekv3": _deepseek(
        r"\w+<｜tool▁sep｜>",
        r"\s*```json\s*",
        r"\s*```",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>name, its JSON in a ```json block, and <｜tool▁call▁end｜>",
    ),
    "deepseekv31": _deepseek(
        "", r"<｜tool▁sep｜>\s*", "", "<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"
    ),
    "gemma4": JsonForm(
        begun=r"<\|tool_call>",
        close="<tool_call|>",
        header=r"<\|tool_call>\s*call:(?P<name>[\w.-]+)\s*",
        end=r"<tool_call\|>",
        written='<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>',
    ),
    **dict.fromkeys(["qwen3_coder", "step3p5"], _CODER),
    "mimo": _function_tags("tool_call", newline="", escaped=True),
    "seed": _function_tags("seed:tool_call", newline=""),
    **dict.fromkeys(["glm", "glm45", "glm47", "poolside_v1"], _GLM),
    "hunyuan": _value_tags(
        begun=r"<tool_calls>(?:\s*<tool_call>)?|<tool_call>",
        header=r"(?:<tool_calls>\s*)?<tool_call>\s*(?P<name>[\w.-]+)\s*<tool_sep>",
        end=r"\s*</tool_call>(?:\s*</tool_calls>)?",
        written="<tool_call>name<tool_sep><arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
    ),
    **dict.fromkeys(["minimax", "minimax-m2"], _MINIMAX),
    **dict.fromkeys(["deepseek_v4", "deepseekv32", "deepseekv4"], _DEEPSEEK),
    "step3": TagForm(
        begun=r"<｜tool_calls_begin｜>(?:\s*<｜tool_call_begin｜>)?|<｜tool_call_begin｜>",
        close="<｜tool_call_end｜>",
        header=r"(?:<｜tool_calls_begin｜>\s*)?<｜tool_call_begin｜>\s*function\s*<｜tool_sep｜>\s*"
        r'<steptml:invoke name="(?P<name>[\w.-]+)">',
        argument=r'\s*<steptml:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</steptml:parameter>',
        end=r"\s*</steptml:invoke>\s*<｜tool_call_end｜>(?:\s*<｜tool_calls_end｜>)?",
        opening=r"<｜tool_call_begin｜>|<steptml:invoke\s+name=|<steptml:parameter\s+name=",
        closing=r"<｜tool_call_end｜>|</steptml:invoke>|</steptml:parameter>",
        written='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="name"><steptml:parameter name="key">'
        "value</steptml:parameter></steptml:invoke><｜tool_call_end｜>",
    ),
    # A call needs no mark: it is a list whose first element looks like a call with named arguments, or with none, or is
    # a call of a tool. At the beginning of a turn, `[name(` is enough. Any other text is an answer.
    "pythonic": PythonForm(begun=r"<\|python_start\|>\s*|(?=\[\s*[\w.-]+\()", close="", mark="<|python_start|>"),
    "lfm2": PythonForm(begun=r"<\|tool_call_start\|>", close="<|tool_call_end|>"),
}

FORMATS = sorted([*_FORMS, "gpt-oss"])
"""Names of all formats that this package reads, sorted."""


def make_call_parser(
    name: str, tokenizer: ParserTokenizer, end_ids: Sequence[int], marks: Sequence[tuple[str, str]]
) -> CallParser:
    """Make the parser of a format.

    `gpt-oss` uses neither `end_ids` nor `marks`: its format fixes both.

    Args:
        name: One of `FORMATS`.
        tokenizer: Decodes the model's turns.
        end_ids: Every token id that ends a turn.
        marks: Pairs of texts that open and close the model's reasoning.
    """
    if name == "gpt-oss":
        return HarmonyParser(tokenizer)
    form = _FORMS[name]
    if isinstance(form, TagForm):
        return TagParser(tokenizer, end_ids, form, marks)
    if isinstance(form, PythonForm):
        return PythonParser(tokenizer, end_ids, form, marks)
    kinds = {"gemma4": GemmaParser, "llama3": LlamaParser}
    return kinds.get(name, JsonParser)(tokenizer, end_ids, form, marks)
