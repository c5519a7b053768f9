"""Calls of a tool as each call format writes them, with any arguments, and texts that cannot be read as a call."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(before: str, after: str, key: str = "arguments") -> Callable[[str, Arguments], str]:
    return lambda name, given: before + json.dumps({"name": name, key: given}, ensure_ascii=False) + after


def after_name(before: str, between: str, after: str) -> Callable[[str, Arguments], str]:
    return lambda name, given: before + name + between + json.dumps(given, ensure_ascii=False) + after


def in_tags(before: str, between: str, argument: str, after: str) -> Callable[[str, Arguments], str]:
    def write(name: str, given: Arguments) -> str:
        written = [argument.format(key, text_of(value)) for key, value in given.items()]
        return before + name + between + "".join(written) + after

    return write


def python(name: str, given: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def gemma(name: str, given: Arguments) -> str:
    def write(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)

    return f"<|tool_call>call:{name}{write(given)}<tool_call|>"


def dsml(name: str, given: Arguments) -> str:
    parameter = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
    written = [
        parameter.format(key, json.dumps(isinstance(value, str)), text_of(value)) for key, value in given.items()
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(written)}</｜DSML｜invoke>'


@dataclass(frozen=True)
class Format:
    names: str
    write: Callable[[str, Arguments], str]
    broken: list[str] = field(default_factory=list)
    between: str = "\n"
    around: str = "{}"


CODER = in_tags("<tool_call>\n<function=", ">\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>")
MIMO = in_tags("<tool_call>\n<function=", ">\n", "<parameter={}>{}</parameter>\n", "</function>\n</tool_call>")
GLM = in_tags("<tool_call>", "\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>")
DEEPSEEK = after_name("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>")
HARMONY = after_name(
    "<|start|>assistant<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"
)
KIMI = after_name("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>")
TABLE = [
    Format(
        "hermes chatml qwen qwen25 trinity",
        as_json("<tool_call>\n", "\n</tool_call>"),
        ["<tool_call>\n{\n</tool_call>", "<tool_call>[]</tool_call>"],
    ),
    Format(
        "interns1",
        as_json("<|action_start|> <|plugin|>\n", "<|action_end|>", "parameters"),
        ["<|action_start|><|plugin|>{oops<|action_end|>", "<|action_start|> <|interpreter|>\nf(1)<|action_end|>"],
    ),
    Format(
        "llama3",
        as_json("", "", "parameters"),
        ["<|python_tag|>f(x=1)", '{"name": "f", ', "{'name': 'f', 'parameters': {'x': 1}}"],
        between=";",
        around="<|python_tag|>{}",
    ),
    Format(
        "mistral",
        after_name("[TOOL_CALLS]", "[ARGS]", ""),
        ["[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS] oops", '[TOOL_CALLS] [{"name": "f"}, 1]', "[TOOL_CALLS] []"],
        between="",
    ),
    Format(
        "deepseekv3",
        DEEPSEEK,
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f",
            "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>",
        ],
        around="<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    ),
    Format(
        "deepseekv31",
        after_name("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ['<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": <｜tool▁call▁end｜>'],
        between="",
        around="<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    ),
    Format(
        "kimi kimi_k2",
        KIMI,
        [
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": <|tool_call_end|>',
            "<|tool_calls_section_begin|>f<|tool_calls_section_end|>",
        ],
        between="",
        around="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
    ),
    Format(
        "gemma4",
        gemma,
        ["<|tool_call>call:f{x:<tool_call|>", "<|tool_call>f(x)<tool_call|>", "<|tool_call>call:f{x:1} 2<tool_call|>"],
        between="",
    ),
    Format(
        "qwen3_coder step3p5",
        CODER,
        [
            "<tool_call>\n<function=f</tool_call>",
            "<tool_call>f</tool_call>",
            "<function=f>\n<parameter=x>\n1\n</function>",
        ],
    ),
    Format("mimo", MIMO, ["<tool_call><function=f><parameter=x>"]),
    Format(
        "seed",
        in_tags(
            "<seed:tool_call>\n<function=", ">\n", "<parameter={}>{}</parameter>\n", "</function>\n</seed:tool_call>"
        ),
        ["<seed:tool_call><function=f", "<seed:tool_call>f</seed:tool_call>"],
    ),
    Format("glm glm45 poolside_v1", GLM, ["<tool_call>f\n<arg_key>x</arg_key>", GLM("f", {"x": 1})[:-12]]),
    Format(
        "glm47",
        in_tags("<tool_call>", "", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
        ["<tool_call>f<arg_key>x</arg_key></tool_call>"],
    ),
    Format(
        "hunyuan",
        in_tags("<tool_call>", "<tool_sep>\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
        ["<tool_calls><tool_call>f<tool_sep>", "<tool_calls>f</tool_calls>"],
        around="<tool_calls>\n{}\n</tool_calls>",
    ),
    Format(
        "minimax minimax-m2",
        in_tags('<invoke name="', '">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>"),
        ["<minimax:tool_call>\n<invoke name=", "<minimax:tool_call>\nf\n</minimax:tool_call>"],
        around="<minimax:tool_call>\n{}\n</minimax:tool_call>",
    ),
    Format(
        "deepseekv32",
        dsml,
        ['<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">', "<｜DSML｜function_calls>f</｜DSML｜function_calls>"],
        around="<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>",
    ),
    Format(
        "deepseekv4 deepseek_v4",
        dsml,
        ["<｜DSML｜tool_calls>f</｜DSML｜tool_calls>"],
        around="<｜DSML｜tool_calls>\n{}\n</｜DSML｜tool_calls>",
    ),
    Format(
        "step3",
        in_tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            '">\n',
            '<steptml:parameter name="{}">{}</steptml:parameter>\n',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        [
            "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>oops",
            "<｜tool_calls_begin｜>f<｜tool_calls_end｜>",
        ],
        around="<｜tool_calls_begin｜>\n{}\n<｜tool_calls_end｜>",
    ),
    Format(
        "pythonic",
        python,
        ["[f(x=", "[f(1)]", "[f(x=y)]", "[f(**x)]", "[f(x=1), g]", "So: [f(x=1", f"[f({'x=1, ' * 60}x"],
        between=", ",
        around="[{}]",
    ),
    Format(
        "lfm2",
        python,
        ["<|tool_call_start|>[f(x=1)]", "<|tool_call_start|>[f(x=1), g(x=y)]<|tool_call_end|>"],
        between=", ",
        around="<|tool_call_start|>[{}]<|tool_call_end|>",
    ),
    Format(
        "gpt-oss",
        HARMONY,
        [
            HARMONY("f", {"x": 1}).replace("<|call|>", ""),
            HARMONY("f", {"x": 1}).replace("<|message|>", ""),
            HARMONY("f", {"x": 1}).replace("1}", ""),
            HARMONY("f", {"x": 1}).replace('{"x": 1}', "[" * 100_000),
        ],
        between="",
    ),
    # A format that allows one call in a turn.
    Format(
        "gigachat3",
        as_json("<|function_call|>", ""),
        ["<|function_call|>f(1)", 'function call<|role_sep|>\n{"name": "f", '],
    ),
]
FORMATS = {name: one for one in TABLE for name in one.names.split()}
SEVERAL = [name for name in FORMATS if name != "gigachat3"]


def write(name: str, *calls: Arguments, tool: str = "f") -> str:
    one = FORMATS[name]
    return one.around.replace("{}", one.between.join(one.write(tool, given) for given in calls))


# Formats whose arguments are unchanged between tags, so that a call cannot mark that a tag in an argument is text. Each
# has the tag that begins an argument, and the tag that ends it.
_PARAMETER = ("<parameter=", "</parameter>")
PLAIN_TAGS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(["qwen3_coder", "step3p5", "mimo", "seed"], _PARAMETER),
    **dict.fromkeys(["glm", "glm45", "glm47", "poolside_v1", "hunyuan"], ("<arg_key>", "</arg_value>")),
    **dict.fromkeys(["minimax", "minimax-m2"], ("<parameter name=", "</parameter>")),
    **dict.fromkeys(["deepseek_v4", "deepseekv32", "deepseekv4"], ("<｜DSML｜parameter", "</｜DSML｜parameter>")),
    "step3": ("<steptml:parameter", "</steptml:parameter>"),
}
