"""Make the recipe's warm-started model: a tiny Qwen2 that plays legal moves, and no good ones.

    python recipes/tictactoe/make_model.py            # minutes on two cores, writes recipes/tictactoe/model

Training is plain SFT on games of the random player against itself, from random openings. Both sides of a game are
conversations of their own, as in `agent.py`.

The last line reports games of the model against the random player: how often it named no free field, and how often it
did not lose.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
sys.path.insert(0, str(HERE.parent / "common"))

from sft import Learner, batch_of, encode  # noqa: E402
from tiny_model import tiny_config  # noqa: E402
from tiny_tokenizer import make_tokenizer  # noqa: E402

from recipes.tictactoe.game import (  # noqa: E402
    FIELDS,
    ROLES,
    SYSTEM_PROMPT,
    after,
    board_of,
    draw_opening,
    is_over,
    name_of,
    random_move,
    read_move,
    role_of,
    show,
    side_to_move,
    winner,
)

MODEL_DIR = HERE / "model"


def system() -> dict[str, Any]:
    """Return the message with which each conversation begins."""
    return {"role": "system", "content": SYSTEM_PROMPT}


def game(rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return the conversations of both sides in a game of the random player, those without a move left out."""
    board = board_of(draw_opening(rng.randrange(6), rng))
    said: dict[str, list[dict[str, Any]]] = {role: [system()] for role in ROLES}
    while not is_over(board):
        move = random_move(board, rng)
        said[role_of(side_to_move(board))] += [
            {"role": "user", "content": show(board)},
            {"role": "assistant", "content": name_of(move, board)},
        ]
        board = after(board, move)
    return [messages for messages in said.values() if len(messages) > 1]


class Encoder:
    """An encoder of conversations that knows their turns again, many times as fast as `sft.encode`.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Return token ids and loss mask of a conversation, as `sft.encode` does."""
        ids = [*self._ids(f"<|im_start|>system\n{messages[0]['content']}<|im_end|>")]
        mask = [0] * len(ids)
        for message in messages[1:]:
            if message["role"] == "user":
                part = self._ids(f"\n<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n")
            else:
                part = self._ids(f"{message['content']}<|im_end|>")
            ids += part
            mask += [int(message["role"] == "assistant")] * len(part)
        return [*ids, *self._ids("\n")], [*mask, 0]

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._known[text]


@torch.no_grad()
def against_random(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, side: int, games: int, seed: int, greedy: bool = True
) -> dict[str, float]:
    """Play games against the random player, and return the shares that were not lost, won and lost by no free field.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        side: The model's side.
        games: Number of games.
        seed: Seed of the random player.
        greedy: Whether it plays its most likely move; False: it samples.
    """
    rng = random.Random(seed)
    playing = [(board_of([]), [system()]) for _ in range(games)]
    lost = won = illegal = 0
    while playing:
        asked = []
        for board, messages in playing:
            if side_to_move(board) != side:
                board = after(board, random_move(board, rng))
            if is_over(board):
                lost += winner(board) == -side
                continue
            asked.append((board, [*messages, {"role": "user", "content": show(board)}]))
        if not asked:
            break
        texts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for _, m in asked]
        rows = [(tokenizer.encode(text, add_special_tokens=False), [0]) for text in texts]
        ends = torch.tensor([len(ids) - 1 for ids, _ in rows])
        ids_BT, _ = batch_of([(ids, [0] * len(ids)) for ids, _ in rows], 0)
        hidden_BTH = model.model(input_ids=ids_BT).last_hidden_state
        logits_BV = model.lm_head(hidden_BTH[torch.arange(len(rows)), ends])
        chosen = logits_BV.argmax(-1) if greedy else torch.distributions.Categorical(logits=logits_BV).sample()
        playing = []
        for (board, messages), token in zip(asked, chosen.tolist(), strict=True):
            text = str(tokenizer.decode([token]))
            move = read_move(text, board)
            if move is None:
                illegal += 1
                continue
            board = after(board, move)
            if is_over(board):
                won += winner(board) == side
                continue
            playing.append((board, [*messages, {"role": "assistant", "content": text}]))
    return {"not_lost": 1 - (lost + illegal) / games, "won": won / games, "illegal": illegal / games}


def main() -> None:
    """Train the tokenizer and the model, and write both into `recipes/tictactoe/model`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16, help="games")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with more, so small a model is slower on a busy machine
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    template = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    texts = ["\n".join(m["content"] for m in side) for _ in range(500) for side in game(rng)]
    texts += ["<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"] * 500
    tokenizer = make_tokenizer(texts, template, 360)
    assert all(len(tokenizer.encode(name, add_special_tokens=False)) == 1 for name in FIELDS)
    torch.manual_seed(args.seed)
    model = Qwen2ForCausalLM(tiny_config(tokenizer, 64, 2, 512, 0.1))
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    encoder = Encoder(tokenizer)
    assert all(encoder.encode(side) == encode(tokenizer, side) for _ in range(9) for side in game(rng))
    learner = Learner(model, args.lr, args.steps, 50)
    started = time.time()
    for step in range(args.steps):
        rows = [encoder.encode(side) for _ in range(args.batch_size) for side in game(rng)]
        ids_BT, labels_BT = batch_of(rows, tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        # Attention is causal and padding on the right, so no attention mask is needed.
        hidden_BTH = model.model(input_ids=ids_BT).last_hidden_state[:, :-1]
        learned_BT = labels_BT[:, 1:] != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden_BTH[learned_BT]), labels_BT[:, 1:][learned_BT])
        learner.update(loss)
        if step % 100 == 0:
            found = against_random(model, tokenizer, 1, 100, 1, greedy=False)
            print(f"step {step} loss {loss.item():.4f} sampled {found} {time.time() - started:.0f} s", flush=True)
    args.out.mkdir(exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    model.float()
    found = {
        f"{role}_{kind}": against_random(model, tokenizer, side, 500, 1, greedy=kind == "greedy")
        for role, side in (("white", 1), ("black", -1))
        for kind in ("greedy", "sampled")
    }
    print(json.dumps({"steps": args.steps, "seed": args.seed, **found, "seconds": round(time.time() - started)}))


if __name__ == "__main__":
    main()
