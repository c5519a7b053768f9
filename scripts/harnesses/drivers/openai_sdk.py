"""A program that uses the OpenAI SDK: a chat with a tool, streamed, structured; and the Responses API."""

from __future__ import annotations

import json
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
DESCRIPTION = "Return the text of a file."
TASK = "Which lot is in lot.txt?"


class Answer(BaseModel):
    """The form of a structured answer."""

    lot: str


def read_file(arguments: str) -> str:
    """Return the text of the file that a call names."""
    return Path(json.loads(arguments)["name"]).read_text(encoding="utf-8")


def chat(client: OpenAI) -> None:
    """Let the model use the tool until it answers, then ask on in the same conversation, streamed."""
    tool = {"name": "read_file", "description": DESCRIPTION, "parameters": PARAMETERS}
    tools = [{"type": "function", "function": tool}]
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": TASK},
    ]
    while True:
        message = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            text = read_file(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    print("chat:", message.content)
    messages.append({"role": "user", "content": "Say it again."})
    with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
        print("stream:", stream.get_final_completion().choices[0].message.content)


def structured(client: OpenAI) -> None:
    """Ask for an answer in the form of a Pydantic model."""
    text = f"{Path('lot.txt').read_text(encoding='utf-8')}\nReturn it as JSON."
    parsed = client.chat.completions.parse(
        model="policy", messages=[{"role": "user", "content": text}], response_format=Answer
    )
    answer = parsed.choices[0].message.parsed
    print("structured:", answer.lot if answer else None)


def responses(client: OpenAI) -> None:
    """Let the model use the tool through the Responses API; the answer comes as a stream."""
    tools = [{"type": "function", "name": "read_file", "description": DESCRIPTION, "parameters": PARAMETERS}]
    items: list = [{"role": "user", "content": f"Once more: {TASK}"}]
    response = client.responses.create(model="policy", input=items, tools=tools)
    items += response.output
    for item in response.output:
        if item.type == "function_call":
            text = read_file(item.arguments)
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": text})
    with client.responses.stream(model="policy", input=items, tools=tools) as stream:
        print("responses:", stream.get_final_response().output_text)


if __name__ == "__main__":
    openai = OpenAI()
    chat(openai)
    structured(openai)
    responses(openai)
