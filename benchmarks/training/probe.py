"""Does `verl-multiturn probe` report the known facts of known models?

    python -m benchmarks.probe [--trained DIR] [--smollm2 DIR] [--limit 64] [--out DIR] [--result FILE]

- `base`: the quickstart's model as it comes with the repository: it calls now and then, and calling pays. "go";
- `never`: the same, but for the token that begins a call: its logit is 0 whatever came before, and so it is hardly ever
  sampled. "warm-start";
- `trained`, with --trained: a finished run of the quickstart. "nothing left to learn";
- `smollm2`, with --smollm2: SmolLM2-135M-Instruct as the recipe's training begins with it (`outputs/smollm2/model`), on
  the recipe's own rows, which lie beside it (`outputs/smollm2/data`). "go".

Each is sampled as its recipe's training samples: `rollout.n` conversations of each of --limit training rows.

Last line: one JSON object; of each model the last line of its probe. The status is 1 if a verdict is another one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.evaluation import begin, ended, model_of, warm

MODEL = model_of("quickstart")
_CALL = 532
"""Id of `<tool_call>` in the quickstart's vocabulary."""
EXPECTED = {"base": "go", "never": "warm-start", "trained": "nothing left to learn", "smollm2": "go"}


def make_never(folder: Path) -> None:
    """Write the quickstart's model without the ability to begin a call."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(MODEL / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()  # the base's output layer is tied to its embeddings
    head[_CALL] = 0
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))


def probed(model: Path, recipe: str, limit: int, out: Path) -> dict[str, Any]:
    """Return the last line of a model's probe, with its seconds."""
    words = ["probe", str(model), "--recipe", recipe, "--limit", str(limit), "--out", str(out)]
    if (rows := model.parent / "data" / "train.parquet").is_file():
        words += ["--rows", str(rows)]
    log, start = out.with_suffix(".log"), time.monotonic()
    status = ended(begin(words, log))
    text = log.read_text(errors="replace")
    print(text, flush=True)
    found = [line for line in text.splitlines() if line.startswith('{"verdict"')]
    if not found:
        raise SystemExit(f"the probe ended with status {status}; its output is {log}")
    told = dict[str, Any](json.loads(found[-1]))
    assert status == int(told["verdict"] != "go"), f"{told['verdict']} ended with status {status}"
    return {**told, "seconds": round(time.monotonic() - start, 1)}


def main() -> int:
    """Probe the models, print the verdicts, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, help="folder of a finished run of the quickstart")
    parser.add_argument("--smollm2", type=Path, help="folder of the model that recipe smollm2 begins with")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--out", type=Path, help="folder of the probes; one that is there goes on")
    parser.add_argument("--result", type=Path, help="write the last line into this file, too")
    asked = parser.parse_args()
    warm()
    with tempfile.TemporaryDirectory() as made:
        out = asked.out or Path(made)
        never = out / "never-model"
        if not never.is_dir():
            out.mkdir(parents=True, exist_ok=True)
            make_never(never)
        models = {"base": (MODEL, "quickstart"), "never": (never, "quickstart")}
        models |= {"trained": (asked.trained, "quickstart")} if asked.trained else {}
        models |= {"smollm2": (asked.smollm2, "smollm2")} if asked.smollm2 else {}
        found = {name: probed(*model, asked.limit, out / name) for name, model in models.items()}
    held = {name: told["verdict"] == EXPECTED[name] for name, told in found.items()}
    line = json.dumps({**found, "holds": held})
    if asked.result:
        asked.result.write_text(line + "\n")
    print(line)
    return int(not all(held.values()))


if __name__ == "__main__":
    raise SystemExit(main())
