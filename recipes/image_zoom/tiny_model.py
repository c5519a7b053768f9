"""Make a tiny Qwen2.5-VL that knows a few conversations about pictures by heart. `--smoke` trains it.

Its classes and processor are the real ones. Its weights start random and are fitted for a minute. It can do nothing
else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from verl_multiturn.runs.data import Row
from verl_multiturn.tools.loading.registry import load_tools

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from sft import ASSISTANT, END, batch_of
from tiny_tokenizer import make_tokenizer

_VOCABULARY = 640
_PATCH = 14
_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# ChatML with pictures. Like Qwen2.5-VL's template, it does not show tools.
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for block in message.content or [] -%}
{%- if block.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif block.type == 'text' -%}
{{ block.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ ('\\n' if message.content else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""  # noqa: E501


def make_model(folder: Path, rows: Sequence[Row], said: Sequence[Sequence[str]], tools: Path, steps: int = 160) -> None:
    """Train the model, and write it with its processor and tokenizer.

    Args:
        folder: Folder for the files.
        rows: Rows of the data set.
        said: The assistant's turns for each row.
        tools: YAML of the image tool. The tool is really called.
        steps: Number of optimizer steps.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more threads, so small a model is slower on a busy machine
    conversations = [asyncio.run(roll_out(row, turns, tools)) for row, turns in zip(rows, said, strict=True)]
    texts = [
        block["text"] for each in conversations for message in each for block in message["content"] if "text" in block
    ]
    processor = make_processor(texts)
    model = transformers.Qwen2_5_VLForConditionalGeneration(make_config(processor.tokenizer))
    wrong = learn(model, processor, conversations, steps)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    ends = processor.tokenizer.convert_tokens_to_ids([END, "<|endoftext|>"])
    transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1]).save_pretrained(folder)
    print(json.dumps({"conversations": len(conversations), "by_heart": len(conversations) - wrong, "steps": steps}))


async def roll_out(row: Row, turns: Sequence[str], tools: Path) -> list[dict[str, Any]]:
    """Return a row's conversation as messages, with the tool's real response to each call.

    Args:
        row: Row of the data set.
        turns: The assistant's turns.
        tools: YAML of the image tool.
    """
    tool = load_tools(tools)["image_zoom"]
    image = Image.open(row["images"][0]).convert("RGB")
    system, user = (message["content"] for message in row["prompt"])
    messages = [
        {"role": "system", "content": [text(system)]},
        {"role": "user", "content": [picture(image), text(user.removeprefix("<image>"))]},
    ]
    await tool.create("smoke", image=image)
    for turn in turns:
        messages.append({"role": "assistant", "content": [text(turn)]})
        _, called, rest = turn.partition("<tool_call>")
        if called:
            call = json.loads(rest.partition("</tool_call>")[0])
            answer = await tool.execute("smoke", call["arguments"])
            messages.append({"role": "tool", "content": [*map(picture, answer.image), text(answer.text)]})
    await tool.release("smoke")
    return messages


def text(value: str) -> dict[str, Any]:
    """Return a block of a message with text."""
    return {"type": "text", "text": value}


def picture(value: Image.Image) -> dict[str, Any]:
    """Return a block of a message with a picture."""
    return {"type": "image", "image": value}


def make_processor(texts: list[str]) -> Any:
    """Return a Qwen2.5-VL processor with a small tokenizer. A picture becomes 4 to 16 placeholder tokens."""
    tokenizer = make_tokenizer(texts, _TEMPLATE, _VOCABULARY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_VISION_TOKENS)})
    side = 2 * _PATCH
    images = transformers.Qwen2VLImageProcessor(min_pixels=4 * side**2, max_pixels=16 * side**2, patch_size=_PATCH)
    videos = transformers.Qwen2VLVideoProcessor(patch_size=_PATCH)
    return transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=_TEMPLATE)


def make_config(tokenizer: Any) -> Any:
    """Return the configuration of a model with two layers for pictures and two for text."""
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(_VISION_TOKENS))
    turn_end, pad = tokenizer.convert_tokens_to_ids([END, "<|endoftext|>"])
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "initializer_range": 0.08,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": turn_end,
            "pad_token_id": pad,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "patch_size": _PATCH,
            "spatial_merge_size": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def learn(model: Any, processor: Any, conversations: Sequence[list[dict[str, Any]]], steps: int) -> int:
    """Train the model on the assistant's turns; return how many conversations greedy decoding still gets wrong."""
    inputs, labels_BT = encode(processor, conversations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    learned_BT = labels_BT[:, 1:] != -100
    target_N = labels_BT[:, 1:][learned_BT]
    for _ in range(steps):
        logits_BTV = model(**inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits_BTV[learned_BT], target_N)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    wrong_BT = torch.zeros_like(learned_BT)
    with torch.no_grad():
        logits_BTV = model(**inputs).logits[:, :-1]
    wrong_BT[learned_BT] = logits_BTV[learned_BT].argmax(-1) != target_N
    return int(wrong_BT.any(dim=1).sum())


def encode(
    processor: Any, conversations: Sequence[list[dict[str, Any]]]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the model's inputs and the labels `[B, T]`, which are -100 outside the assistant's turns."""
    written = [processor.apply_chat_template(messages, tokenize=False) for messages in conversations]
    images = [block["image"] for each in conversations for m in each for block in m["content"] if "image" in block]
    inputs = processor(text=written, images=images, padding=True, return_tensors="pt")
    opening = processor.tokenizer.encode(ASSISTANT, add_special_tokens=False)
    end = processor.tokenizer.convert_tokens_to_ids(END)
    rows = [
        (ids, spoken(ids, opening, end))
        for ids in (
            row_T[mask_T.bool()].tolist()
            for row_T, mask_T in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        )
    ]
    return dict(inputs), batch_of(rows, processor.tokenizer.pad_token_id)[1]


def spoken(ids: list[int], opening: list[int], end: int) -> list[int]:
    """Return the loss mask `(tokens,)`: 1 at the assistant's words and the end token after them, else 0.

    Args:
        ids: Token ids of the conversation.
        opening: Ids of the text that begins an assistant's turn.
        end: Id of the token that ends a turn.
    """
    mask = [0] * len(ids)
    speaking = False
    for at in range(len(ids)):
        if speaking:
            mask[at] = 1
            speaking = ids[at] != end
        elif ids[at + 1 - len(opening) : at + 1] == opening:
            speaking = True
    return mask
