"""The second turn of a conversation with images, with the real SGLang on the CPU (a process for `test_vision_setup`).

    python -m tests.integration.vision_engine KIND FOLDER

The first turn is given. It calls a tool, in other tokens than its text is tokenized to. The last line is one JSON
object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_multiturn.rollout.engines.protocol import Ask


class HalfReal:
    """An engine that returns the given first turn, and takes the others from SGLang."""

    def __init__(self, server: Any, first: list[int]) -> None:
        self._server, self._first = server, first
        self.prompt_tokens = 0

    async def generate(self, ask: Ask) -> Any:
        from verl_multiturn import Generation

        if self._first:
            first, self._first = self._first, []
            return Generation(first, [-1.0] * len(first), [0] * len(first), "stop")
        params = {"max_new_tokens": ask.max_new_tokens, "temperature": 1.0, **ask.sampling}
        said = await self._server.async_generate(
            input_ids=list(ask.ids), image_data=list(ask.images), sampling_params=params, return_logprob=True
        )
        about = said["meta_info"]
        self.prompt_tokens = about["prompt_tokens"]
        logprobs = [float(logprob) for logprob, _, _ in about["output_token_logprobs"]]
        return Generation(said["output_ids"], logprobs, [0] * len(logprobs), about["finish_reason"]["type"])


def main(kind: str, path: Path) -> None:
    # This import loads the plugin, which registers its parts with SGLang.
    from verl.utils.tokenizer import hf_processor

    from tests.integration.vision import CALL, image, picture, roll, text, trainer_side
    from tests.integration.vision_models import save_model

    save_model(path, kind)
    processor = hf_processor(str(path))
    tokenizer = processor.tokenizer
    first = [*tokenizer.encode("Hel"), *tokenizer.encode("lo"), *tokenizer.encode(f"\n{CALL}<|im_end|>")]

    import sglang
    import torch
    import transformers

    from verl_multiturn.cpu.defaults import ATTENTION

    server = sglang.Engine(
        model_path=str(path),
        device="cpu",
        attention_backend="torch_native",
        **ATTENTION,
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        max_total_tokens=4096,
        mem_fraction_static=0.8,  # share of the memory that is free while the engine starts
        dtype="float32",
        skip_tokenizer_init=True,
    )
    try:
        from tests.support.rollout_config import make_config
        from verl_multiturn import ToolResponse
        from verl_multiturn.verl_bridge.loops.runner import build_runner
        from verl_multiturn.verl_bridge.model.loading import LoadedModel
        from verl_multiturn.verl_bridge.model.processors import image_reader

        engine = HalfReal(server, first)
        config = make_config(len(first) + 60)
        config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns = 2
        runner = build_runner(config, LoadedModel(tokenizer, kind, processor, image_reader(processor, {})), engine)
        answer = ToolResponse("Two.", image=[picture(32, 2, 2, 1), picture(32, 3, 3, 2)])
        outcome, receipts, output = asyncio.run(roll(runner, [image(picture(32, 3, 2)), text("What?")], [answer]))
    finally:
        server.shutdown()

    ids, positions, features = trainer_side(processor, SimpleNamespace(**output.model_dump()))
    features.pop("images_seqlens", None)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(1), **features).logits[0]
    last = receipts[-1]
    at = torch.arange(last.prompt_tokens, last.prompt_tokens + len(last.ids))
    expected = logits.log_softmax(-1)[at - 1, ids[at]]
    result = {
        "images": len(outcome.images),
        "given": last.prompt_tokens,
        "seen": engine.prompt_tokens,
        "sampled": len(last.ids),
        "difference": float((expected - torch.tensor(last.logprobs.copy())).abs().max()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
