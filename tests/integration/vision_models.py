"""Tiny vision-language models of the Qwen series: real classes, the real tokenizer, real processors and templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.support.families import _template_text, family
from tests.support.vocabularies import _trained

_NAMES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
_SMALL = _trained(
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>",
    "<tool_call> </tool_call>", eos="<|im_end|>", pad="<|endoftext|>",
)  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Make a picture of noise, so that two pictures are never equal."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def save_processor(path: Path, kind: str, template: str = "qwen3_vl", is_small: bool = False) -> None:
    """Save a processor, a tokenizer and config.json.

    A picture has 4 to 16 placeholders, one for each `side` × `side` pixels. A small tokenizer is loaded in a moment,
    and has other ids than Qwen's.
    """
    tokenizer = _SMALL.tokenizer if is_small else family("qwen2.5").tokenizer
    name = _NAMES[kind]
    patch = 16 if kind == "qwen3_vl" else 14
    side = 2 * patch
    videos = "Qwen3VLVideoProcessor" if kind == "qwen3_vl" else "Qwen2VLVideoProcessor"
    images = transformers.Qwen2VLImageProcessor(
        min_pixels=4 * side * side, max_pixels=16 * side * side, patch_size=patch
    )
    processor = getattr(transformers, f"{name}Processor")(
        images, tokenizer, getattr(transformers, videos)(patch_size=patch), chat_template=_template_text(template)
    )
    processor.save_pretrained(path)
    config_of(kind, tokenizer).save_pretrained(path)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1]).save_pretrained(path)


def save_model(path: Path, kind: str) -> None:
    """Save a whole model, with random weights."""
    torch.manual_seed(0)
    getattr(transformers, f"{_NAMES[kind]}ForConditionalGeneration")(config_of(kind)).save_pretrained(path)
    save_processor(path, kind)


def config_of(kind: str, tokenizer: Any = None) -> Any:
    """Return the configuration of a model; its tokenizer is Qwen's unless another one is given."""
    tokenizer = tokenizer or family("qwen2.5").tokenizer
    special = ("image_pad", "video_pad", "vision_start", "vision_end", "im_end", "endoftext")
    image, video, start, end, turn_end, pad = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in special])
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "pad_token_id": pad,
        "rope_parameters": rope,
    }
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
    small = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
    if kind == "qwen2_vl":
        # SGLang reads `in_chans`, the name in the published config.json.
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "in_chans": 3}
    elif kind == "qwen2_5_vl":
        vision |= {**small, "window_size": 56, "fullatt_block_indexes": [1]}
    else:
        vision |= {**small, "patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        text["head_dim"] = 16
        rope["mrope_interleaved"] = True
    return getattr(transformers, f"{_NAMES[kind]}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        architectures=[f"{_NAMES[kind]}ForConditionalGeneration"],
    )
