"""A conversation in text mode with the real SGLang on the CPU (a process for `test_tir`).

    python -m tests.integration.tir_engine FOLDER

The model always writes the same: each token depends on the token before it alone. It writes the output marker in
pieces, in more tokens than the marker has by itself, and would go on after it. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from verl_multiturn.rollout.engines.protocol import Ask

# Each text is one token. "\n" begins a message, "`\n" ends an output.
CALL = ["```python\n", "print(6*7", ")\n```\n", "`", "``", "ou", "tp", "ut"]
BEYOND = ["never", "sampled"]
ANSWER = ["Done"]
WHOLE = "```output"


def save_model(path: Path) -> Any:
    """Save a Qwen2 model whose layers add nothing, with a tokenizer that has the pieces above; return the tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    tokenizer.add_tokens([WHOLE, "`\n", *CALL, *BEYOND, *ANSWER])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    ids = {piece: tokenizer.convert_tokens_to_ids(piece) for piece in [*CALL, *BEYOND, *ANSWER, "`\n"]}
    ids["\n"] = tokenizer.encode("\n")[0]
    ids["<|im_end|>"] = tokenizer.eos_token_id
    chains = (["\n", *CALL, *BEYOND, BEYOND[-1]], ["`\n", *ANSWER, "<|im_end|>"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.randn(len(tokenizer), 256)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for chain in chains:
            for piece, following in itertools.pairwise(chain):
                model.lm_head.weight[ids[following]] += embedding[ids[piece]]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return tokenizer


class Server:
    """SGLang as an `Engine`, called in the same way as by verl."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.said: list[list[int]] = []
        self.reasons: list[str] = []

    async def generate(self, ask: Ask) -> Any:
        from verl_multiturn import Generation

        params = {"temperature": 1.0, **ask.sampling, "max_new_tokens": ask.max_new_tokens}
        said = await self._server.async_generate(input_ids=list(ask.ids), sampling_params=params, return_logprob=True)
        about = said["meta_info"]
        self.said.append(list(said["output_ids"]))
        self.reasons.append(about["finish_reason"]["type"])
        logprobs = [float(logprob) for logprob, _, _ in about["output_token_logprobs"]]
        return Generation(said["output_ids"], logprobs, [0] * len(logprobs), about["finish_reason"]["type"])


def main(path: Path) -> None:
    tokenizer = save_model(path)

    import sglang
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.loops.output import to_outputs
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    multi_turn = {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 100,
        "tool_response_truncate_side": "middle",
        "tool_config_path": str(ROOT / "tool_configs" / "python.yaml"),
        "format": "tir",
    }
    rollout = {"prompt_length": 200, "response_length": 60, "multi_turn": multi_turn}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    server = sglang.Engine(
        model_path=str(path),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        max_total_tokens=4096,
        mem_fraction_static=0.8,  # share of the memory that is free while the engine starts
        dtype="float32",
        skip_tokenizer_init=False,
    )
    try:
        engine = Server(server)
        runner = build_runner(config, LoadedModel(tokenizer, "qwen2"), engine)

        async def converse() -> Any:
            row = {"raw_prompt": [{"role": "user", "content": "6*7?"}]}
            try:
                return await runner.run(await runner.request(row, runner.sampling({"logprobs": True}), "r"))
            finally:
                await runner.tools["python"].aclose()

        outcome, _ = asyncio.run(converse())
    finally:
        server.shutdown()
    result = {
        "said": [tokenizer.convert_ids_to_tokens(ids) for ids in engine.said],
        "reasons": engine.reasons,
        "ids": outcome.trajectory.ids[outcome.trajectory.prompt_length :],
        "engine_ids": engine.said,
        "mask": to_outputs(outcome, runner.output_settings, 0)[0].response_mask,
        "text": tokenizer.decode(outcome.trajectory.ids[outcome.trajectory.prompt_length :]),
        "stop": str(outcome.stop_reason),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
