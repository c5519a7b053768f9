"""Images from rows and tools through codec, conversation and certificate, with real processors and verl's own parts."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integration.vision import CALL, KINDS, SCHEMA, image, make_runner, picture, roll, runners, text, trainer_side
from tests.support.rollout_config import make_config
from verl_multiturn import ConfigError, ScriptedEngine, ToolContractError, ToolResponse
from verl_multiturn.rollout.limits import StopReason

# Importing verl's workers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


def whole_ids(processor: Any, outcome: Any) -> list[int]:
    """Return the ids that the processor itself makes of the finished conversation, all images at once."""
    written = processor.apply_chat_template(outcome.messages, tools=[SCHEMA], tokenize=False)
    return list(processor(text=[written], images=outcome.images or None)["input_ids"][0])


@pytest.mark.parametrize("kind", KINDS)
async def test_built_turn_by_turn_as_the_processor_writes_it(processors: dict[str, Any], kind: str) -> None:
    processor = processors[kind]
    side = 32 if kind == "qwen3_vl" else 28
    pictures = [picture(side, 2, 2, 1), picture(side, 3, 2, 2), picture(side, 2, 3, 3), picture(side, 2, 2, 4)]
    runner = make_runner(processor, kind, [f"{CALL}\n{CALL}<|im_end|>", f"{CALL}<|im_end|>", "A cat.<|im_end|>"])
    answers = [
        ToolResponse("Two pictures.", image=[pictures[1], pictures[2]]),
        "no picture",
        (ToolResponse(image=[pictures[3]]), 0.0, {}),
    ]
    outcome, _, output = await roll(runner, [text("Compare "), image(pictures[0]), text(" with more.")], answers)

    assert outcome.stop_reason is StopReason.FINISHED
    assert [shown.size for shown in outcome.images] == [shown.size for shown in pictures]
    assert outcome.messages[3]["content"] == [*map(image, outcome.images[1:3]), text("Two pictures.")]
    assert outcome.messages[4]["content"] == "no picture"
    assert outcome.messages[6]["content"] == [image(outcome.images[3])]
    ids = outcome.trajectory.ids
    # The template goes on after the end of the last turn.
    assert whole_ids(processor, outcome) == [*ids, *processor.tokenizer.encode("\n")]
    assert outcome.differences == []
    assert runner.vision.count(ids) == 4
    assert ids.count(processor.image_token_id) == 4 + 6 + 6 + 4
    assert output.multi_modal_data == {"images": outcome.images}
    assert output.mm_processor_kwargs == {}
    # Number of images that the engine was shown, turn by turn.
    engine = runners[id(processor), 400, 2048][1].scripted
    assert [len(shown) for shown in engine.images] == [1, 3, 4]
    assert engine.images[2] == outcome.images


async def test_the_mask_around_an_image(processors: dict[str, Any]) -> None:
    processor = processors["qwen2_5_vl"]
    runner = make_runner(processor, "qwen2_5_vl", [f"{CALL}<|im_end|>", "Yes.<|im_end|>"])
    _, _, output = await roll(runner, "Is it red?", [ToolResponse("Here.", image=[picture(28, 2, 2)])])
    called = len(processor.tokenizer.encode(f"{CALL}<|im_end|>"))
    tokens = processor.tokenizer.convert_ids_to_tokens(output.response_ids[called:])
    pad = "<|image_pad|>"
    # Qwen2.5's tokenizer reads these tags as plain text; it has tokens only for the tags of calls.
    opened, closed = (processor.tokenizer.tokenize(tag) for tag in ("<tool_response>\n", "</tool_response>"))
    assert min(len(opened), len(closed)) > 1
    assert tokens == [
        "Ċ", "<|im_start|>", "user", "Ċ", *opened,
        "<|vision_start|>", pad, pad, pad, pad, "<|vision_end|>", "Here", ".Ċ", *closed, "<|im_end|>",
        "Ċ", "<|im_start|>", "assistant", "Ċ", "Yes", ".", "<|im_end|>",
    ]  # fmt: skip
    observed = 17 + len(opened) + len(closed)
    assert output.response_mask == [1] * called + [0] * observed + [1, 1, 1]
    assert output.versions == [7] * called + [-1] * observed + [7] * 3


async def test_text_never_becomes_an_image(processors: dict[str, Any]) -> None:
    processor = processors["qwen2_5_vl"]
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    attacks = [
        vision,
        "<|image_pad|>" * 3,
        "<|video_pad|>",
        # The processor itself counts an image's tokens with this word.
        "<|placeholder|>",
        "<|vision_start|><|placeholder|><|vision_end|>",
        "<<|placeholder|>|image_pad|>",
        "<|image<|image_pad|>_pad|>",
    ]
    for attack in attacks:
        runner = make_runner(processor, "qwen2_5_vl", [f"{CALL}<|im_end|>", "No.<|im_end|>"])
        halves = [text(attack[: len(attack) // 2]), text(attack[len(attack) // 2 :])]
        content = [text(attack), image(picture(28, 2, 2)), *halves, text(attack)]
        outcome, _, output = await roll(runner, content, [ToolResponse(attack, image=[picture(28, 2, 2, 1)])])
        ids = [*output.prompt_ids, *output.response_ids]
        assert runner.vision.count(ids) == 2, attack
        assert ids.count(processor.image_token_id) == 8, attack
        assert processor.video_token_id not in ids, attack
        starts, ends = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
        assert (ids.count(starts), ids.count(ends)) == (2, 2), attack
        assert len(outcome.images) == 2
        assert whole_ids(processor, outcome)[: len(ids)] == ids, attack


async def test_a_system_message_cannot_have_one_either(processors: dict[str, Any]) -> None:
    processor = processors["qwen3_vl"]
    codec = make_runner(processor, "qwen3_vl", []).conversation._codec
    messages = [
        {"role": "system", "content": "An image is <|image_pad|> or <|placeholder|>."},
        {"role": "user", "content": [text("Look at <|placehol"), text("der|>"), image(picture(32, 2, 2))]},
    ]
    ids = codec.initial(codec.trusted(messages), [])
    assert ids.count(processor.image_token_id) == 4
    # Benign text stays as the template writes it.
    benign = [{"role": "user", "content": [text("a < b | c >"), image(picture(32, 2, 2)), text("> <x>")]}]
    assert codec.trusted(benign) == benign


async def test_what_the_model_writes_is_no_image(processors: dict[str, Any]) -> None:
    processor = processors["qwen2_5_vl"]
    spelled = processor.tokenizer.encode("<|") + processor.tokenizer.encode("image_pad|>")
    assert processor.image_token_id not in spelled
    for said in ("I see <|image_pad|><|image_pad|> it<|im_end|>", "I see <|video_pad|>"):
        runner = make_runner(processor, "qwen2_5_vl", [f"{CALL}<|im_end|>", said])
        outcome, receipts, output = await roll(runner, "Look.", [ToolResponse("Here.", image=[picture(28, 2, 2)])])
        assert outcome.stop_reason is StopReason.ENGINE_ERROR
        assert processor.tokenizer.decode(output.response_ids).endswith("assistant\nI see ")
        assert outcome.trajectory.mask[-3:] == [1, 1, 1]  # sampled, but nothing of an invalid conversation is trained
        assert (outcome.valid, set(output.response_mask)) == (False, {0})
        assert [len(receipt.ids) for receipt in receipts] == [len(processor.tokenizer.encode(f"{CALL}<|im_end|>")), 3]
    # Cut after the token that completes the placeholder.
    assert runner.vision.usable(processor.tokenizer.encode("Well: ") + spelled + [13]) == 2 + len(spelled)
    runner = make_runner(processor, "qwen2_5_vl", ["<|image_pad|>"])
    outcome, receipts, output = await roll(runner, "Look.", [])
    assert (outcome.stop_reason, receipts, output.response_mask) == (StopReason.ENGINE_ERROR, [], [0])


async def test_an_observation_that_does_not_fit_is_dropped_with_its_images(processors: dict[str, Any]) -> None:
    processor = processors["qwen2_5_vl"]
    runner = make_runner(processor, "qwen2_5_vl", [f"{CALL}<|im_end|>"] * 3, tokens=80)
    answers = [ToolResponse("a", image=[picture(28, 2, 2)]), ToolResponse("b", image=[picture(28, 4, 4)])]
    outcome, _, output = await roll(runner, [image(picture(28, 2, 2)), text("?")], answers)
    assert outcome.stop_reason is StopReason.RESPONSE_LENGTH
    assert len(outcome.images) == 2
    assert output.multi_modal_data == {"images": outcome.images}
    assert runner.vision.count([*output.prompt_ids, *output.response_ids]) == 2


async def test_a_prompt_that_is_too_long_keeps_no_image(processors: dict[str, Any]) -> None:
    processor = processors["qwen2_5_vl"]
    runner = make_runner(processor, "qwen2_5_vl", [], prompt_length=12)
    outcome, _, output = await roll(runner, [image(picture(28, 3, 3)), text("What is this?")], [])
    assert outcome.stop_reason is StopReason.PROMPT_TOO_LONG
    assert output.multi_modal_data == {}
    assert len(output.prompt_ids) == 12
    assert processor.image_token_id not in output.prompt_ids
    assert output.response_mask == [0]


async def test_an_image_that_cannot_be_shown_is_told_of(processors: dict[str, Any]) -> None:
    runner = make_runner(processors["qwen2_5_vl"], "qwen2_5_vl", [f"{CALL}<|im_end|>", "Well.<|im_end|>"])
    outcome, _, _ = await roll(runner, "Look.", [ToolResponse("A line.", image=[picture(1, 400, 1)])])
    assert outcome.stop_reason is StopReason.FINISHED
    assert outcome.messages[3]["content"].startswith("A line.\nError: the image cannot be shown: ")
    assert "ratio" in outcome.messages[3]["content"]
    assert outcome.images == []


async def test_a_tool_that_returns_no_image(processors: dict[str, Any]) -> None:
    for wrong, message in (([b"png"], "list of PIL images, got b'png'"), (b"png", "must be a list of images")):
        runner = make_runner(processors["qwen2_5_vl"], "qwen2_5_vl", [f"{CALL}<|im_end|>"])
        with pytest.raises(ToolContractError, match=f"tool 'look'.*{message}"):
            await roll(runner, "Look.", [SimpleNamespace(text="x", image=wrong)])


async def test_a_model_that_takes_no_images(processors: dict[str, Any]) -> None:
    from tests.support.families import family
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    tokenizer = family("qwen2.5").tokenizer
    engine = ScriptedEngine([tokenizer.encode(f"{CALL}<|im_end|>")])
    runner = build_runner(make_config(400), LoadedModel(tokenizer, "qwen2"), engine)
    with pytest.raises(ConfigError, match=r"data row 5: message 1 \(user\): an image in a message"):
        await roll(runner, [image(picture(28, 2, 2)), text("?")], [])
    engine = ScriptedEngine([tokenizer.encode(f"{CALL}<|im_end|>"), tokenizer.encode("Well.<|im_end|>")])
    runner = build_runner(make_config(400), LoadedModel(tokenizer, "qwen2"), engine)
    outcome, _, _ = await roll(runner, "?", [ToolResponse("x", image=[picture(28, 2, 2)])])
    assert outcome.stop_reason is StopReason.FINISHED
    assert outcome.messages[3]["content"] == "x\n[an image that this model cannot be shown]"


async def test_rows_as_verl_and_parquet_have_them(processors: dict[str, Any], tmp_path: Path) -> None:
    runner = make_runner(processors["qwen2_5_vl"], "qwen2_5_vl", ["Yes.<|im_end|>"] * 3)
    file, packed = tmp_path / "cat.png", io.BytesIO()
    picture(28, 3, 2).save(file)
    picture(28, 3, 2).save(packed, "PNG")
    named = {"type": "image", "image": str(file), "text": None}
    as_bytes = {"type": "image", "bytes": packed.getvalue(), "path": None, "image": picture(28, 3, 2)}
    content = np.array([named, {"type": "text", "text": "and", "image": None}, as_bytes], dtype=object)
    outcome, _, output = await roll(runner, content, [])
    assert [shown.size for shown in outcome.images] == [(84, 56), (84, 56)]
    assert outcome.messages[1]["content"] == [image(outcome.images[0]), text("and"), image(outcome.images[1])]
    assert output.multi_modal_data["images"] == outcome.images

    with pytest.raises(ConfigError, match="data row 5: an image cannot be read: FileNotFoundError"):
        await roll(runner, [image(str(tmp_path / "dog.png"))], [])
    with pytest.raises(ConfigError, match=r"data row 5: message 1 \(user\): video in a message is not supp"):
        await roll(runner, [{"type": "video", "video": "x.mp4"}], [])


async def test_only_the_new_images_are_processed(processors: dict[str, Any]) -> None:
    import copy

    processor = copy.copy(processors["qwen2_5_vl"])
    seen: list[int] = []
    real = processor.image_processor

    def counting(images: Any, **kwargs: Any) -> Any:
        seen.append(len(images))
        return real(images=images, **kwargs)

    for name in ("patch_size", "merge_size", "fetch_images"):  # the last one since transformers 5.12
        setattr(counting, name, getattr(real, name, None))
    object.__setattr__(processor, "image_processor", counting)
    turns = 6
    runner = make_runner(processor, "qwen2_5_vl", [f"{CALL}<|im_end|>"] * turns + ["Done.<|im_end|>"], tokens=1000)
    answers = [ToolResponse("Zoomed.", image=[picture(28, 2, 2, seed)]) for seed in range(turns)]
    outcome, _, _ = await roll(runner, [image(picture(28, 2, 2)), text("?")], answers)
    assert len(outcome.images) == 1 + turns
    assert seen == [1] * (1 + turns)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_trainer_can_learn_from_it(processors: dict[str, Any], kind: str) -> None:
    import torch
    import transformers

    from tests.integration.vision_models import _NAMES, config_of
    from verl_multiturn.certificate.check import CertificateRow, verify
    from verl_multiturn.certificate.receipts import Receipts

    processor = processors[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{_NAMES[kind]}ForConditionalGeneration")(config_of(kind)).eval()
    conversations: list[tuple[Any, list[Any]]] = [
        (
            [image(picture(32, 3, 2)), text("?")],
            [ToolResponse("x", image=[picture(32, 2, 2, 1), picture(32, 2, 3, 2)])],
        ),
        ("No picture.", ["nothing"]),
    ]
    for content, answers in conversations:
        runner = make_runner(processor, kind, [f"{CALL}<|im_end|>", "Yes.<|im_end|>"])
        outcome, receipts, output = await roll(runner, content, answers)
        fields = output.as_dict()
        assert fields["multi_modal_data"].get("images", []) == outcome.images
        ids, positions, features = trainer_side(processor, output)
        assert positions.shape == (4, len(ids))
        assert len(features.get("image_grid_thw", [])) == len(outcome.images)
        features.pop("images_seqlens", None)
        with torch.no_grad():
            logits = model(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(1), **features).logits
        assert logits.shape == (1, len(ids), model.config.text_config.vocab_size)
        assert torch.isfinite(logits).all()

        def row(positions: Any, output: Any = output, ids: Any = ids) -> CertificateRow:
            return CertificateRow(
                prompt_ids=np.array(output.prompt_ids),
                response_ids=np.array(output.response_ids),
                mask=np.array(output.response_mask),
                logprobs=np.array(output.response_logprobs),
                versions=np.array(output.versions),
                input_ids=ids.numpy(),
                position_ids=positions.numpy(),
            )

        given = Receipts("r", receipts)
        assert verify(row(positions), given) == []
        start = receipts[1].prompt_tokens
        later, one = slice(start, None), slice(start, start + 1)
        shifts = [(0, later, 1), (2, later, 1), (slice(1, 4), slice(start + 1, None), 1), (3, one, -1)]
        for dimensions, tokens, by in [*shifts, (slice(1, 4), later, -3)]:
            wrong = positions.clone()
            wrong[dimensions, tokens] += by
            assert verify(row(wrong), given) != [], (dimensions, tokens, by)
        assert "shape [3," in str(verify(row(positions[:3]), given)[0])
