"""Calls from the test cases of SGLang and vLLM, rewritten here as data: each must be read exactly.

Sources: SGLang, `test/registered/function_call/test_function_call_parser.py`; vLLM, `tests/tool_parsers/`.
"""

from typing import Any

Calls = list[tuple[str, dict[str, Any]]]
WEATHER: Calls = [("get_weather", {"city": "Paris"})]
DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
TODOS = [{"content": "Buy groceries", "status": "pending"}, {"content": "Finish report", "status": "completed"}]
SELECT = "SELECT * FROM users WHERE name = 'John \"Doe\"'"
MEMORY = {"action": "create", "id": "preferences", "content": {"short_answers": True, "english_ui": False}}
CITY = "\n<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX\n</parameter>\n<parameter=unit>\nfahrenheit\n</parameter>\n"  # noqa: E501
GLM = """<tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Dallas</arg_value>
    <arg_key>state</arg_key>
    <arg_value>TX</arg_value>
    <arg_key>unit</arg_key>
    <arg_value>fahrenheit</arg_value>
    </tool_call>"""
SEED_THOUGHT = (
    "<seed:think>\nThe format is <seed:tool_call>\n<function=f>\n<parameter=x>Barcelona</parameter>\n</function>\n"
    "</seed:tool_call>. <seed:cot_budget_reflect>I have used 131 tokens.</seed:cot_budget_reflect></seed:think>"
)
DSML = """I'll help you.

    <｜DSML｜function_calls>

        <｜DSML｜invoke name="get_weather">

            <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>

        </｜DSML｜invoke>
        <｜DSML｜invoke name="search">
            <｜DSML｜parameter name="query" string="true">WebNav benchmark</｜DSML｜parameter>
            <｜DSML｜parameter name="topn" string="false">10</｜DSML｜parameter>
            <｜DSML｜parameter name="obj" string="false">{"name": "John", "age": 30}</｜DSML｜parameter>
        </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """
DSML_JSON = """<｜DSML｜function_calls>
        <｜DSML｜invoke name="search">
        {
            "query": "WebNav benchmark",
            "topn": 10
        }
    </｜DSML｜invoke>
    </｜DSML｜function_calls>"""
DEEPSEEK = """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city":"Paris"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Beijing"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""
KIMI = (
    "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 <|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>process:1 <|tool_call_argument_begin|>'
    '{\n  "html": "<div>content</div>"\n}<|tool_call_end|><|tool_calls_section_end|>'
)
STEP3 = (
    "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="edit"><steptml:parameter name="old">    if x:\n        return 1\n</steptml:parameter>'
    '<steptml:parameter name="indent"> 4 </steptml:parameter><steptml:parameter name="on"> true </steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
)
HARMONY = (
    '<|channel|>analysis<|message|>User asks: "What is the weather?" We need to use get_weather tool.<|end|>'
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{\n"city": "Paris"\n}<|call|><|start|>assistant to=functions.search<|channel|>commentary<|message|>{"query": "x"}'
    "<|call|>"
)

HONEST: list[tuple[str, str, Calls]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "final", "arguments": {"trigger": true}}\n</tool_call>',
        [("final", {"trigger": True})],
    ),
    ("hermes", 'Sure.<tool_call>{"name": "get_weather","arguments": {"city":"Paris"}}</tool_call>', WEATHER),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"q": "cats"}}</tool_call>'
        '<tool_call>{"name": "a", "arguments": {"q": "杭州"}}</tool_call>',
        [("a", {"q": "cats"}), ("a", {"q": "杭州"})],
    ),
    ("hermes", '<tool_call>\n{"name": "db", "arguments": "{\\"p\\": \\"m\\"}"}\n</tool_call>', [("db", {"p": "m"})]),
    ("qwen25", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', WEATHER),
    ("qwen3_coder", f"<tool_call>\n<function=get_weather>{CITY}</function>\n</tool_call>", [("get_weather", DALLAS)]),
    ("qwen3_coder", f"<function=get_weather>{CITY}</function>", [("get_weather", DALLAS)]),
    (
        "qwen3_coder",
        f"Sure! Let me check.<tool_call><function=get_weather>{CITY}</function></tool_call>",
        [("get_weather", DALLAS)],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=area>\n<parameter=shape>\nrectangle\n</parameter>\n<parameter=dimensions>\n"
        '{"width": 10, \n "height": 20}\n</parameter>\n<parameter=precision>\n2\n</parameter>\n</function>\n'
        "</tool_call>",
        [("area", {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=TodoWrite>\n<parameter=todos>\n[\n"
        '  {"content": "Buy groceries", "status": "pending"},\n'
        '  {"content": "Finish report", "status": "completed"}\n]\n'
        "</parameter>\n</function>\n</tool_call>",
        [("TodoWrite", {"todos": TODOS})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x></parameter>\n</function>\n</tool_call>",
        [("f", {"x": ""})],
    ),
    (
        "qwen3_coder",
        f"<tool_call>\n<function=sql>\n<parameter=query>{SELECT}</parameter>\n</function>\n</tool_call>",
        [("sql", {"query": SELECT})],
    ),
    ("glm45", GLM, [("get_weather", DALLAS)]),
    ("glm45", f"I'll help you.\n\n{GLM}\n\nmeaningwhile, more.\n\n{GLM}", [("get_weather", DALLAS)] * 2),
    ("glm45", f"<think>I want to get the weather.</think>\n\nI will.\n{GLM}", [("get_weather", DALLAS)]),
    ("glm45", "<tool_call>get_current_time\n</tool_call>", [("get_current_time", {})]),
    (
        "glm47",
        "<tool_call>todo<arg_key>todos</arg_key><arg_value>"
        r'[{"id": "1", "task": "Check file at C:\\Users\\test.txt"}]</arg_value></tool_call>',
        [("todo", {"todos": [{"id": "1", "task": r"Check file at C:\Users\test.txt"}]})],
    ),
    (
        "seed",
        f"{SEED_THOUGHT}\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
        "</seed:tool_call>",
        WEATHER,
    ),
    (
        "minimax-m2",
        'Let me check. <minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>'
        '<invoke name="days"><parameter name="days">5</parameter></invoke></minimax:tool_call>',
        [*WEATHER, ("days", {"days": 5})],
    ),
    ("step3", STEP3, [("edit", {"old": "    if x:\n        return 1\n", "indent": 4, "on": True})]),
    (
        "deepseekv32",
        DSML,
        [*WEATHER, ("search", {"query": "WebNav benchmark", "topn": 10, "obj": {"name": "John", "age": 30}})],
    ),
    ("deepseekv32", DSML_JSON, [("search", {"query": "WebNav benchmark", "topn": 10})]),
    ("deepseekv3", DEEPSEEK, [*WEATHER, ("get_weather", {"city": "Beijing"})]),
    ("kimi_k2", KIMI, [*WEATHER, ("process", {"html": "<div>content</div>"})]),
    ("gpt-oss", HARMONY, [*WEATHER, ("search", {"query": "x"})]),
    (
        "mistral",
        '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}, '
        '{"name": "add", "arguments":{"a": 3.5}}]\nmore',
        [("get_age", {"name": "John Doe"}), ("add", {"a": 3.5})],
    ),
    (
        "mistral",
        'Here: [TOOL_CALLS] [{"name":"decide", "arguments":{"content":"```\\nTOOL: [City Name] - [Weather]\\n```"}}]',
        [("decide", {"content": "```\nTOOL: [City Name] - [Weather]\n```"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]decide[ARGS]{"decision":"TOOL", "content":"x"}',
        [("decide", {"decision": "TOOL", "content": "x"})],
    ),
    (
        "llama3",
        '{"name": "search", "parameters": {"query": "test query", "limit": 10}}',
        [("search", {"query": "test query", "limit": 10})],
    ),
    (
        "llama3",
        '{"name": "search", "arguments": {"query": "test"}} I used {search} for this.',
        [("search", {"query": "test"})],
    ),
    (
        "llama3",
        '{"name": "a", "parameters": {"q": "test {value} [complex]"}} ; {"name": "b", "parameters": {}} ; '
        '{"name": "a", "parameters": {"q": "He said \\"Hello {world}\\""}}',
        [("a", {"q": "test {value} [complex]"}), ("b", {}), ("a", {"q": 'He said "Hello {world}"'})],
    ),
    (
        "pythonic",
        "Here's a call: [get_weather(city='Paris', data=[1, 2, 3])]",
        [("get_weather", {"city": "Paris", "data": [1, 2, 3]})],
    ),
    (
        "pythonic",
        "[search(query='test', config={'options': [1, 2], 'nested': {'key': 'value'}})]",
        [("search", {"query": "test", "config": {"options": [1, 2], "nested": {"key": "value"}}})],
    ),
    (
        "pythonic",
        "On Mars. <|python_start|>[get_weather(city='Paris')]<|python_end|> In this way we will get the weather.",
        WEATHER,
    ),
    (
        "lfm2",
        "<|tool_call_start|>[register(name='John Doe', age=37, address={'city': 'San Francisco'}, role=None, ok=True, "
        "aliases=['John', 'Johnny']), get_weather(city='Martha\\'s \\\"Vineyard\\\"')]<|tool_call_end|>\nChecking.",
        [
            (
                "register",
                {
                    "name": "John Doe",
                    "age": 37,
                    "address": {"city": "San Francisco"},
                    "role": None,
                    "ok": True,
                    "aliases": ["John", "Johnny"],
                },
            ),
            ("get_weather", {"city": 'Martha\'s "Vineyard"'}),
        ],
    ),
    (
        "lfm2",
        "<|tool_call_start|> [exec(command='grep -F \"]\" log.txt')]<|tool_call_end|>",
        [("exec", {"command": 'grep -F "]" log.txt'})],
    ),
    ("gemma4", 'Let me. <|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', WEATHER),
    (
        "gemma4",
        '<|tool_call>call:get-it{nested:{inner:<|"|>a, b<|"|>},list:[<|"|>a<|"|>,42],on:true,score:3.14}<tool_call|>'
        '<|tool_call>call:map.it{record:{<|"|>3<|"|>:<|"|>new text<|"|>}}<tool_call|>',
        [
            ("get-it", {"nested": {"inner": "a, b"}, "list": ["a", 42], "on": True, "score": 3.14}),
            ("map.it", {"record": {"3": "new text"}}),
        ],
    ),
    (
        "gigachat3",
        'I will.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "memory", "arguments": {"action": "create", '
        '"id": "preferences", "content": {"short_answers": true, "english_ui": false}}}</s>',
        [("memory", MEMORY)],
    ),
]
