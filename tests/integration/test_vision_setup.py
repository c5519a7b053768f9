"""Images before and in the engine: start-up checks, settings, prompt lengths, SGLang's processors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.vision import image, picture, text
from tests.support.warm_python import run_warm
from verl_multiturn import ConfigError

# Importing verl's workers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a processor whose vocabulary is small."""
    from tests.integration.vision_models import save_processor

    folder = tmp_path_factory.mktemp("small") / "qwen2_5_vl"
    save_processor(folder, "qwen2_5_vl", is_small=True)
    return folder


async def test_the_start_up_check_looks_at_images(processors: dict[str, Any]) -> None:
    import copy

    from tests.support.families import _template_text
    from verl_multiturn.chat.template import Template, examine_template
    from verl_multiturn.chat.template_rules import refusals
    from verl_multiturn.verl_bridge.model.call_formats import make_parser
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    async def examine(template: str, **kwargs: Any) -> Any:
        processor = copy.copy(processors["qwen2_5_vl"])
        processor.chat_template = template
        chat = make_chat(processor.tokenizer, "qwen2_5_vl", kwargs, processor=processor)
        parser = make_parser("hermes", processor.tokenizer, chat.end_ids)
        parts = (processor.tokenizer, chat.codec, chat.check, parser, chat.end_ids, chat.generation_prompt)
        return await examine_template(Template(*parts))

    rules = await examine(_template_text("qwen3_vl"))
    assert (rules[-1].name, rules[-1].found) == ("images in prompts and answers", "the same tokens")
    assert refusals(rules) == ""
    # The increments cannot know how many pictures came before.
    numbered = await examine(_template_text("qwen3_vl"), add_vision_id=True)
    assert refusals(numbered) == "images in prompts and answers: unexplained difference: context"
    # The template that Qwen2.5-VL is published with shows the model no tools; it writes images in every role.
    published = _template_text("qwen2_5_vl")
    rules = await examine(published)
    assert (rules[-1].found, refusals(rules)) == ("the same tokens", "")
    # A template that writes the images of user messages only.
    condition = "content['type'] == 'image' or 'image' in content or 'image_url' in content"
    assert condition in published
    blind = await examine(published.replace(condition, f"message['role'] == 'user' and ({condition})"))
    assert "writes placeholders for 0 images where the messages have 2" in refusals(blind)


def test_the_engine_resizes_as_the_trainer_does(small: Path) -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.startup.refusals.loops import CONVERSATIONS
    from verl_multiturn.verl_bridge.startup.setting_changes import IMAGES, resize_images
    from verl_multiturn.verl_bridge.startup.table import RefusalRow
    from verl_multiturn.verl_bridge.startup.view import RunView

    def config(kwargs: dict[str, Any], engine: dict[str, Any]) -> Any:
        rollout = {"engine_kwargs": {"sglang": engine}}
        model = {"path": str(small)}
        data = {"mm_processor_kwargs": kwargs}
        return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": model}, "data": data})

    one = config({"max_pixels": 6272, "images_kwargs": {"min_pixels": 784}}, {})
    resize_images(RunView(one))
    engine_kwargs = one.actor_rollout_ref.rollout.engine_kwargs.sglang
    assert engine_kwargs.mm_process_config == {"image": {"max_pixels": 6272, "min_pixels": 784}}
    (row,) = (each for each in CONVERSATIONS if isinstance(each, RefusalRow) and each.key == IMAGES)
    row(RunView(one))  # the same settings may be written out
    with pytest.raises(ConfigError, match="engine and trainer would see other images"):
        row(RunView(config({"max_pixels": 6272}, {"mm_process_config": {"image": {"max_pixels": 9}}})))


def test_a_processor_is_loaded_where_it_lies_and_missed_where_it_is_needed(small: Path, tmp_path: Path) -> None:
    from verl_multiturn.verl_bridge.model.processors import load_processor

    assert load_processor(str(tmp_path), "llama", False) is None
    with pytest.raises(
        ConfigError, match=r"model_type 'qwen2_5_vl'\) takes images, and verl cannot load its processor"
    ):
        load_processor(str(tmp_path), "qwen2_5_vl", False)
    # verl loads a processor that lies there, also for a model type that it does not know.
    assert load_processor(str(small), "new_vl", False).image_token == "<|image_pad|>"


async def test_mm_processor_kwargs_reach_the_prompt_and_the_trainer(processors: dict[str, Any]) -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    processor = processors["qwen2_5_vl"]
    message = {"role": "user", "content": [image(picture(28, 4, 4)), text("?")]}
    counts = []
    for kwargs in ({}, {"images_kwargs": {"max_pixels": 4 * 28 * 28, "min_pixels": 28 * 28}}):
        codec = make_chat(processor.tokenizer, "qwen2_5_vl", processor=processor, mm_processor_kwargs=kwargs).codec
        counts.append(codec.initial([message], []).count(processor.image_token_id))
    assert counts == [16, 4]


def test_prompts_with_images_are_measured(small: Path) -> None:
    from verl_multiturn.verl_bridge.model.chat_setup import PromptMeasure
    from verl_multiturn.verl_bridge.model.loading import load_model

    packed = io.BytesIO()
    picture(28, 4, 4).save(packed, "PNG")
    row = {"prompt": [{"role": "user", "content": "<image>What?"}], "images": [{"bytes": packed.getvalue()}]}
    measure = PromptMeasure(load_model({"path": str(small)}, ""), {})
    assert measure(row) - measure({"prompt": [{"role": "user", "content": "What?"}]}) == 18
    with pytest.raises(ConfigError, match="its images do not fit its prompt"):
        measure({**row, "images": []} | {"images": [row["images"][0]] * 2})


async def test_batches_of_spmd_callers_have_no_images() -> None:
    from verl_multiturn.verl_bridge.loops.spmd import AsyncSGLangRollout

    rollout = object.__new__(AsyncSGLangRollout)
    rollout.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3_vl"))
    with pytest.raises(ConfigError, match="generate_sequences takes no vision-language models"):
        await rollout._build_runner({})


async def test_sglang_leaves_the_ids_as_they_are(models: dict[str, Path]) -> None:
    """Compare SGLang's own class with ours.

    SGLang's class encodes the text anew, so a prompt in other tokens becomes shorter.
    """
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from transformers import AutoConfig, AutoProcessor

    from verl_multiturn.verl_bridge.sglang.processors.qwen_vl import GivenIdsQwenVL

    path = str(models["qwen3_vl"])
    processor, config = AutoProcessor.from_pretrained(path), AutoConfig.from_pretrained(path)
    args = ServerArgs(model_path="dummy", device="cpu", skip_tokenizer_init=True, mm_process_config={})
    set_global_server_args_for_scheduler(args)
    pictures = [picture(32, 3, 2), picture(32, 2, 2, 1)]
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    written = f"<|im_start|>user\n{vision}and{vision}<|im_end|>\n<|im_start|>assistant\n"
    prompt = list(processor(text=[written], images=pictures)["input_ids"][0])
    sampled = [*processor.tokenizer.encode("Hel"), *processor.tokenizer.encode("lo")]
    assert processor.tokenizer.encode("Hello") != sampled
    request = SimpleNamespace(video_data=None, audio_data=None, rid="r")

    async def process(kind: Any, ids: list[int]) -> Any:
        return await kind(config, args, processor, "default").process_mm_data_async(pictures, ids, request)

    for ids in (prompt, prompt + sampled):
        theirs, ours = await process(QwenVLImageProcessor, ids), await process(GivenIdsQwenVL, ids)
        assert ours.input_ids == ids
        assert [item.offsets for item in ours.mm_items] == [item.offsets for item in theirs.mm_items]
        assert all((a.feature == b.feature).all() for a, b in zip(ours.mm_items, theirs.mm_items, strict=True))
        assert ours.mrope_positions.shape == (3, len(ids))
        assert (ours.mrope_positions[:, : len(prompt)] == theirs.mrope_positions[:, : len(prompt)]).all()
        # When this line fails one day, SGLang keeps the ids by itself, and our class can go.
        assert (theirs.input_ids == ids) == (ids == prompt)
    with pytest.raises(ValueError, match=r"image placeholders of \[4\] tokens in the prompt, the images need \[6, 4\]"):
        await process(GivenIdsQwenVL, [*prompt[:4], *([processor.image_token_id] * 4), *prompt[-3:]])


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["qwen3_vl"])  # qwen2_5_vl: recipes/image_zoom/run.sh --smoke
def test_the_real_engine_sees_what_the_trainer_learns_from(kind: str, tmp_path: Path) -> None:
    done = run_warm("-m", "tests.integration.vision_engine", kind, str(tmp_path), timeout_s=1700)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["images"] == 3
    # SGLang's own class would have joined two tokens of the first turn.
    assert result["seen"] == result["given"]
    assert result["sampled"] > 3
    assert result["difference"] < 1e-4
