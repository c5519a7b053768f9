"""Put the model of the cold start where the recipe looks for it: `python recipes/retool/sft/report.py OUT_DIR`.

`OUT_DIR/model` becomes a link to the last checkpoint. The script prints one line, a JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verl_multiturn.runs.last_table import recipe_of


def main() -> None:
    """Make the link, and print its path."""
    out = Path(sys.argv[1])
    step = (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    model = out / "model"
    model.unlink(missing_ok=True)
    model.symlink_to(Path("checkpoints") / f"global_step_{step}" / "huggingface")
    print(json.dumps({"recipe": recipe_of(out), "step": int(step), "model": str(model)}))


if __name__ == "__main__":
    main()
