"""Is an exported folder the model that was trained?

    python -m benchmarks.export [--run DIR] [--base DIR] [--parts ranks lora trained run] [--out DIR]

- **ranks**: verl's own checkpoint manager writes one model from 1, 2 and 4 processes (FSDP2, gloo). The exports must
  have one hash, and the logits that the model had before it was split.
- **lora**: the same of a base with an adapter drawn at random, from 1 and 2 processes. The export's logits must be
  within 1e-4 of the model's, and more than 0.1 from the base's.
- **trained**: the same of an adapter that verl's own FSDP2 engine trained for three updates, in one process. verl's own
  merger (`verl.model_merger`) merges the same checkpoint, and its result is compared with both, too.
- **run** (`--run`): a finished quickstart's folder, with records. The exported model reads each conversation of the
  last validation, which was greedy. Its most likely token must be the one that was sampled, at every sampled token. The
  base is tested in the same way.

Exit status 1: something of this does not hold. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.export_checkpoints import logits_of, train_lora, write
from verl_multiturn.models.export import export
from verl_multiturn.models.location import find_model
from verl_multiturn.records.read.records import read_records
from verl_multiturn.rollout.trajectory import Source

ROOT = Path(__file__).resolve().parents[2]
NEAR, FAR = 1e-4, 0.1
PARTS = ("ranks", "lora", "trained", "run")
_SAMPLED = int(Source.SAMPLED)


def quiet(text: str) -> None:
    """Take a line of progress."""


def load(folder: Path) -> Any:
    """Return the model of a folder, computing in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference between logits."""
    return float((one - other).abs().max())


def of_ranks(base: Path, out: Path) -> dict[str, Any]:
    """Export one model from 1, 2 and 4 ranks."""
    found: dict[str, Any] = {"hashes": {}, "difference": 0.0, "seconds": {}}
    for ranks in (1, 2, 4):
        trained = write(base, out / f"ranks-{ranks}", ranks, lora=False)
        began = time.monotonic()
        done = export(find_model(out / f"ranks-{ranks}"), out / f"from-{ranks}", None, quiet)
        found["seconds"][ranks] = round(time.monotonic() - began, 1)
        found["hashes"][ranks] = done.model
        found["difference"] = max(found["difference"], far(logits_of(load(out / f"from-{ranks}")), trained))
    found["holds"] = len(set(found["hashes"].values())) == 1 and found["difference"] <= NEAR
    return found


def of_lora(base: Path, out: Path) -> dict[str, Any]:
    """Export a LoRA model from 1 and 2 ranks."""
    untrained = logits_of(load(base))
    found: dict[str, Any] = {"hashes": {}, "from_trained": 0.0, "from_base": float("inf")}
    for ranks in (1, 2):
        trained = write(base, out / f"lora-{ranks}", ranks, lora=True)
        found["hashes"][ranks] = export(find_model(out / f"lora-{ranks}"), out / f"merged-{ranks}", None, quiet).model
        merged = logits_of(load(out / f"merged-{ranks}"))
        found["from_trained"] = max(found["from_trained"], far(merged, trained))
        found["from_base"] = min(found["from_base"], far(merged, untrained))
    checks = [found["from_trained"] <= NEAR, found["from_base"] > FAR, len(set(found["hashes"].values())) == 1]
    found["holds"] = all(checks)
    return found


def of_trained_lora(base: Path, out: Path) -> dict[str, Any]:
    """Export an adapter that verl's own engine trained, and merge the same checkpoint by verl's own merger."""
    untrained, trained = logits_of(load(base)), train_lora(base, out / "trained")
    began = time.monotonic()
    export(find_model(out / "trained"), out / "ours", None, quiet)
    seconds = round(time.monotonic() - began, 1)
    ours = logits_of(load(out / "ours"))
    found: dict[str, Any] = {"from_trained": far(ours, trained), "from_base": far(ours, untrained), "seconds": seconds}
    found["holds"] = found["from_trained"] <= NEAR and found["from_base"] > FAR
    words = ["-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(out / "trained")]
    began = time.monotonic()
    ran = subprocess.run([sys.executable, *words, "--target_dir", str(out / "verls")], capture_output=True, check=False)
    found["merger"] = {"status": ran.returncode, "seconds": round(time.monotonic() - began, 1)}
    if ran.returncode == 0:
        theirs = logits_of(load(out / "verls"))
        found["merger"] |= {"from_trained": far(theirs, trained), "from_base": far(theirs, untrained)}
    return found


def of_run(run: Path, base: Path, out: Path) -> dict[str, Any]:
    """Export a run, and let export and base read the conversations of its last validation."""
    began = time.monotonic()
    model = find_model(run)
    done = export(model, out / "run", None, quiet)
    seconds = round(time.monotonic() - began, 1)
    records = [each for each in read_records(run / "records") if each["validation"] and each["step"] == model.step]
    exported, untrained = load(out / "run"), load(base)
    equal = sum(is_greedy(exported, record) for record in records)
    return {
        "step": model.step,
        "model": done.model,
        "difference": done.difference,
        "conversations": len(records),
        "equal": equal,
        "equal_of_base": sum(is_greedy(untrained, record) for record in records),
        "seconds": seconds,
        "holds": len(records) == equal > 0,
    }


def is_greedy(model: Any, record: dict[str, Any]) -> bool:
    """Return whether a model, given all tokens before it, would have sampled each sampled token of a conversation."""
    for row in record["rows"]:
        with torch.no_grad():
            best = model(input_ids=torch.tensor([row["ids"]]), use_cache=False).logits[0].argmax(-1).tolist()
        place = 0
        for count, _, _, _, source in row["runs"]:
            sampled = range(place, place + count) if source == _SAMPLED else ()
            if any(best[at - 1] != row["ids"][at] for at in sampled):
                return False
            place += count
    return True


def main() -> int:
    """Run the requested parts, print a table and a JSON object, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished quickstart")
    parser.add_argument("--base", type=Path, default=ROOT / "recipes" / "quickstart" / "model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, help="folder for all files; a temporary one by default")
    given = parser.parse_args()
    out = (given.out or Path(tempfile.mkdtemp(prefix="export-"))).absolute()
    results: dict[str, Any] = {}
    if "ranks" in given.parts:
        results["ranks"] = of_ranks(given.base, out)
    if "lora" in given.parts:
        results["lora"] = of_lora(given.base, out)
    if "trained" in given.parts:
        results["trained"] = of_trained_lora(given.base, out)
    if "run" in given.parts and given.run is not None:
        results["run"] = of_run(given.run, given.base, out)
    table = Table("part", "found", title="export")
    for name, found in results.items():
        table.add_row(f"{name} {'ok' if found['holds'] else 'NO'}", json.dumps(found))
    Console(width=160).print(table)
    print(json.dumps(results))
    return 0 if results and all(found["holds"] for found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
