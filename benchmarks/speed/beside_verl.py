"""How long is a step of the quickstart beside one with verl's own agent loop?

    python -m benchmarks.beside_verl [--steps 10] [--rounds 1] [--seed 1] [--out FOLDER]

Three arms train the same model on the same rows, in turns, with the same threads: `verl` with verl's ToolAgentLoop and
its engine row by row; `off` with our loop and no prefix trees; `auto` with our loop and prefix trees. The reward is
that of `benchmarks.outage`, which scores the conversations of both loops. Nothing is validated, and no checkpoint is
written. The first step of a run, which warms up, does not count.

The last line is one JSON object: `ratio_off` and `ratio_auto` are our median step over verl's; `phases` has the median
seconds of each phase of a step, by arm; `rewards` the mean reward of the last step, so that the arms are seen to train.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks.quickstart_runs import ROOT, arguments, folder, start

_ROLLOUT = "actor_rollout_ref.rollout"
_TREE = f"++{_ROLLOUT}.custom.multiturn.prefix_tree"
REWARD = ROOT / "benchmarks" / "training" / "outage_reward.py"
"""The recipe's reward less a tenth for each call: the recipe's own reads columns that verl's loop does not write."""
PHASES = ("step", "gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights")
"""Names of verl's timers, in seconds of a step."""


def words_of(arm: str, out: Path) -> list[str]:
    """Return the settings of an arm, whose tool file is written to a folder where verl's loop needs one of its own."""
    if arm != "verl":
        return [f"{_TREE}={arm}"]
    entry = yaml.safe_load((ROOT / "tool_configs" / "calculator.yaml").read_text())["tools"][0]
    entry |= {"class_name": "benchmarks.calculator_verl.VerlCalculator", "config": {"type": "native"}}
    out.mkdir(parents=True, exist_ok=True)
    tools = out / "tools.yaml"
    tools.write_text(json.dumps({"tools": [entry]}))  # JSON is YAML
    return [f"recipe.tools={tools}", f"{_ROLLOUT}.agent.default_agent_loop=tool_agent", f"{_TREE}=off"]


def run(arm: str, steps: int, seed: int, out: Path) -> list[dict[str, float]]:
    """Run an arm, and return the metrics of its steps but the first."""
    plain = ["trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.save_freq=-1"]
    reward = f"reward.custom_reward_function.path={REWARD}"
    with start("sync", steps, seed, out / "run", *plain, reward, *words_of(arm, out)) as running:
        if running.wait():
            raise SystemExit(f"the arm {arm} failed with exit status {running.returncode}")
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines][1:]


def summarize(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the figures of all arms."""
    phases = {
        arm: {
            name: round(statistics.median(values), 3)
            for name in PHASES
            if (values := [each[f"timing_s/{name}"] for each in steps if f"timing_s/{name}" in each])
        }
        for arm, steps in found.items()
    }
    ratios = {f"ratio_{arm}": round(phases[arm]["step"] / phases["verl"]["step"], 3) for arm in ("off", "auto")}
    rewards = {arm: round(steps[-1]["critic/score/mean"], 3) for arm, steps in found.items()}
    return {**ratios, "phases": phases, "rewards": rewards}


def main() -> None:
    """Run the arms in turns, and print the figures."""
    parser = arguments(__doc__ or "", modes=("sync",))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    out = folder(given.out, "beside_verl")
    found: dict[str, list[dict[str, float]]] = {"verl": [], "off": [], "auto": []}
    for number in range(given.rounds):
        for arm, steps in found.items():
            steps += run(arm, given.steps, given.seed, out / f"{arm}-{number}")
    print(json.dumps(summarize(found)))


if __name__ == "__main__":
    main()
