"""A simulated user: it thinks of a number, answers whether a guess is too high or too low, and pays for a right one."""

import asyncio

from verl_multiturn import Interaction, Reply, scripted_rollout
from verl_multiturn.rollout.scripted_chat import transcript


class Guess(Interaction):
    def __init__(self, config):
        super().__init__(config)
        self.guesses = {}  # by conversation

    def start(self, instance_id, *, number=7):  # `number` comes from the data row
        self.guesses[instance_id] = 0
        return Reply("I think of a number from 1 to 9.")

    def reply(self, instance_id, messages, *, number=7):
        self.guesses[instance_id] += 1
        said = messages[-1]["content"].strip()
        if said == str(number):
            return Reply(reward=1.0, done=True)
        if not said.isdigit():
            return Reply("Write a number and nothing else.", reward=-0.1)
        return Reply("It is higher." if int(said) < number else "It is lower.", state=said)

    def score(self, instance_id):
        return -0.1 * self.guesses[instance_id]

    def close(self, instance_id):
        self.guesses.pop(instance_id, None)  # runs also if `start` failed


if __name__ == "__main__":
    turns, row = ["Five?", "5", "7"], {"number": 7}
    outcome = asyncio.run(scripted_rollout([], turns, "Let us play.", interaction=Guess({}), interaction_kwargs=row))
    for source, text in transcript(outcome)[1:]:
        print(f"{source.name:11} {text!r}")
    print(f"ended: {outcome.stop_reason}, rewards {[r.reward for r in outcome.replies]}, score {outcome.score:.1f}")
