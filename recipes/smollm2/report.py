"""One JSON object on what a run of `run.sh` came to: `python recipes/smollm2/report.py OUT_DIR`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    out = Path(sys.argv[1])
    steps = [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    records = [json.loads(line) for path in (out / "records").glob("*.jsonl") for line in path.read_text().splitlines()]
    report = {
        "steps": len(steps),
        "conversations": len(records),
        "tool_calls": sum(len(record["calls"]) for record in records),
        "sampled_tokens": sum(sum(record["mask"]) for record in records),
        "stop_reasons": sorted({record["stop_reason"] for record in records}),
        "reward_mean": steps[-1]["critic/score/mean"],
        "prob_diff_mean": steps[-1]["training/rollout_probs_diff_mean"],
        "prob_diff_max": steps[-1]["training/rollout_probs_diff_max"],
        "step_seconds": round(steps[-1]["timing_s/step"], 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
