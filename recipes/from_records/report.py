"""The result of SFT on records: `python recipes/from_records/report.py OUT_DIR`.

`OUT_DIR/model` becomes a link to the last checkpoint, for `verl-multiturn eval`. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verl_multiturn.runs.last_table import recipe_of


def main() -> None:
    """Make the link, and print the model's sources."""
    out = Path(sys.argv[1])
    step = (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    model = out / "model"
    model.unlink(missing_ok=True)
    model.symlink_to(Path("checkpoints") / f"global_step_{step}" / "huggingface")
    lines = [json.loads(line) for line in (out / "data" / "lineage.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {
        "recipe": recipe_of(out),
        "steps": int(step),
        "rows": len(lines),
        "conversations": len({line["request_id"] for line in lines}),
        "trained_tokens": sum(line["trained_tokens"] for line in lines),
        "model": str(model),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
