"""Does a model learn from the recorded conversations of its own evaluation, and is each learned token a sampled one?

    python -m benchmarks.from_records [--base DIR] [--out DIR] [--steps 24]

1. The quickstart's untrained model answers 64 of the recipe's training rows 8 times each, at temperature 1
   (`verl-multiturn eval`; `--base`: the folder of such an evaluation).
2. `recipes/from_records` learns from the right ones, at most 4 of a row: verl's SFT trainer, on the CPU.
3. Both models answer the recipe's 128 held-out rows, greedily. The accuracy must rise by 0.2 or more.
4. Of each learned row the tokens are compared with the records: each token that the data set hands over to be learned
   lies in a generation whose receipt has the digest that the engine's answer had, and no other token is learned.
5. Searching for the conversations of another model, the recipe finds none.

Exit status 1: something of this does not hold. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet

from benchmarks.quickstart_runs import ROOT, folder
from verl_multiturn.errors import ConfigError
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.records.read.learning import SelectionRule, choose
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.verify.record import receipts_of

MODEL = ROOT / "recipes" / "quickstart" / "model"
ROWS, SAMPLES, RISE = 64, 8, 0.2
_ELSE = "0" * 16


def ours(*words: str, attempts: int = 1) -> None:
    """Run `verl-multiturn` with these words.

    Args:
        words: The words.
        attempts: How often it is tried: an evaluation of which conversations are invalid goes on when it is repeated.

    Raises:
        SystemExit: It failed.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-m", "verl_multiturn.cli", *words]
    if not any(
        subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0 for _ in range(attempts)
    ):
        raise SystemExit(f"verl-multiturn {' '.join(words)} failed")


def base_conversations(out: Path) -> Path:
    """Let the untrained model answer training rows, and return the folder."""
    script = ROOT / "recipes" / "quickstart" / "prepare_data.py"
    subprocess.run([sys.executable, str(script), "--out", str(out / "rows")], check=True)
    rows = pyarrow.parquet.read_table(out / "rows" / "train.parquet").slice(0, ROWS)
    pyarrow.parquet.write_table(rows, out / "rows" / "asked.parquet")
    asked = ["--rows", str(out / "rows" / "asked.parquet"), "--samples", str(SAMPLES), "--temperature", "1"]
    ours("eval", str(MODEL), "--recipe", "quickstart", *asked, "--out", str(out / "base"), attempts=3)
    return out / "base"


def accuracy(model: Path, out: Path) -> float:
    """Return the share of the held-out rows that a model solves."""
    ours("eval", str(model), "--recipe", "quickstart", "--out", str(out), "--trust", attempts=3)
    rows = read_results(out).rows
    return sum(row.rate for row in rows) / len(rows)


def learn(base: Path, model: str, out: Path, steps: int) -> Path:
    """Learn from the right ones, and return the folder of the run."""
    ours(
        "run", "from_records", "--smoke", f"--out={out}", f"recipe.records=[{base}]", f"recipe.models=['{model}']",
        f"model.path={MODEL}", "data.train_batch_size=16", "optim.lr=5e-4", "trainer.total_epochs=1000",
        f"trainer.total_training_steps={steps}",
    )  # fmt: skip
    return out


def traced(run: Path) -> dict[str, Any]:
    """Compare the learned data with the records; the records are read here, and their receipts built again."""
    from verl_multiturn.verl_bridge.offline.from_records.dataset import RecordedRows

    data = RecordedRows(str(run / "data" / "train.parquet"))
    lines = [json.loads(line) for line in (run / "data" / "lineage.jsonl").read_text().splitlines()]
    records: dict[str, dict[str, Any]] = {}
    for path in {line["file"] for line in lines}:
        records |= {record["request_id"]: record for record in Records(path).records()}
    found = {"rows": len(data), "lines": len(lines), "learned_tokens": 0, "untraced_tokens": 0, "other_rewards": 0}
    for number, line in enumerate(lines):
        item, record = data[number], records[line["request_id"]]
        mask = item["loss_mask"].bool()
        learned = item["input_ids"][mask].tolist()
        digests = {each["digest"] for each in record["generations"]}
        receipts = receipts_of(record)[line["index"]].generations
        sampled = [int(each) for receipt in receipts if receipt.digest in digests for each in receipt.ids]
        found["learned_tokens"] += len(learned)
        found["untraced_tokens"] += len(learned) if learned != sampled else 0
        found["other_rewards"] += line["reward"] < 1.0
    return found


def another(base: Path) -> int:
    """Return how many conversations of another model are found."""
    try:
        return len(choose([base], SelectionRule(models=(_ELSE,))).conversations)
    except ConfigError as error:
        print(error)
        return 0


def main() -> None:
    """Collect, learn and measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="folder of an evaluation of the untrained model")
    parser.add_argument("--out", type=Path, help="folder of the runs; a temporary one by default")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    began, out = time.monotonic(), folder(args.out, "from_records")
    out.mkdir(parents=True, exist_ok=True)
    base = args.base.absolute() if args.base is not None else base_conversations(out)
    results = read_results(base)
    model = results.evaluation.model.hash
    found: dict[str, Any] = {
        "conversations": sum(len(row.samples) for row in results.rows),
        "right": sum(row.right for row in results.rows),
        "model": model,
        "another_models_rows": another(base),
    }
    run = learn(base, model, out / "sft", args.steps)
    found |= {"steps": args.steps, **traced(run)}
    found["after"] = accuracy(run / "model", out / "held-out-after")
    found["before"] = accuracy(MODEL, out / "held-out-before")
    found["seconds"] = round(time.monotonic() - began, 1)
    found["ok"] = (
        found["after"] - found["before"] >= RISE
        and found["another_models_rows"] == found["untraced_tokens"] == found["other_rewards"] == 0
        and found["rows"] == found["lines"]
    )
    print(json.dumps(found))
    raise SystemExit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
