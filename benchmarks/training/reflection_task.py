"""The task of `benchmarks.reflection`: sums of three digits, and a user who only reports a wrong answer.

    user:   State the final answer to the following arithmetic problem: 3 - 8 + 2 =
    model:  Answer: -4
    user:   That is wrong. Try again.
    model:  Answer: -3

The sums are the quickstart's (`chain_sum` of reasoning_gym), with three numbers of one digit, worded and scored as
there. No tool is offered, so the model adds by itself.

`verl-multiturn run` calls this file in the place of the quickstart's `prepare_data.py`, with `--tries`: how many
answers a training row allows. A held-out row allows `HELD_OUT_TRIES` in every arm, so that first and second answers of
all models are measured alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym

from verl_multiturn import Interaction, Reply
from verl_multiturn.runs.data import Row, arguments, make_row, prepare, write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart"))

from task import DATA_SOURCE, extract_answer, make_messages, score_answer  # the recipe's own module

WRONG = "That is wrong. Try again."
HELD_OUT_TRIES = 2
HELD_OUT, TRAINED = 256, 2048
"""Number of rows that are held out, and that are trained on."""
DRAWN = 2 * TRAINED
"""Number of sums that a run's seed draws; the next seed draws the next ones."""
_SUMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
# The start model's seed lies above; the seeds of runs lie below.
_HELD_OUT_SEED = 9_000_000


class Verdict(Interaction):
    """A user who ends the conversation at a right answer, and otherwise asks again until the row's tries are used up.

    The reward of a turn is 1 for a right answer, else 0. It is recorded, not trained on: the quickstart's reward
    function scores the last answer.
    """

    def reply(self, instance_id: str, messages: Sequence[Mapping[str, Any]], *, truth: str, tries: int) -> Reply:  # type: ignore[override]
        """Judge the model's answer.

        Args:
            instance_id: Id of the conversation.
            messages: The conversation so far.
            truth: The right answer.
            tries: How many answers the row allows.
        """
        right = score_answer(extract_answer(str(messages[-1]["content"])), truth)
        given = sum(message["role"] == "assistant" for message in messages)
        return Reply(WRONG, reward=right, done=right == 1.0 or given >= tries)


def sums(size: int, seed: int, without: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Make entries of chain_sum, each with `question` and `answer`.

    Args:
        size: How many to draw; one may occur twice.
        seed: Seed of the first; the next has the next seed, and so on, as reasoning_gym counts them.
        without: Questions to leave out, which makes the list shorter.
    """
    excluded = set(without)
    drawn = reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **_SUMS)
    return [entry for entry in drawn if entry["question"] not in excluded]


def held_out() -> list[dict[str, Any]]:
    """Return the held-out entries, each once: the same in every run."""
    distinct = {entry["question"]: entry for entry in sums(2 * HELD_OUT, _HELD_OUT_SEED)}
    return list(distinct.values())[:HELD_OUT]


def trained(seed: int) -> list[dict[str, Any]]:
    """Return the entries that a run trains on, none of which is held out."""
    return sums(DRAWN, DRAWN * seed, {entry["question"] for entry in held_out()})[:TRAINED]


def row(entry: Mapping[str, Any], tries: int) -> Row:
    """Return the row of an entry, whose user allows so many tries."""
    return make_row(
        DATA_SOURCE,
        make_messages(entry["question"]),
        entry["answer"],
        ability="math",
        interaction="verdict",
        interaction_kwargs={"truth": entry["answer"], "tries": tries},
    )


def main() -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = arguments(__doc__ or "", None)
    parser.add_argument("--tries", type=int, required=True, help="how many answers a training row allows")
    args = parser.parse_args()
    rows = {
        "train": [row(entry, args.tries) for entry in trained(args.seed)],
        "test": [row(entry, HELD_OUT_TRIES) for entry in held_out()],
    }
    write_rows(args.out, rows, args.tools)


if __name__ == "__main__":
    prepare(main)
