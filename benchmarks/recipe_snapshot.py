"""Whether every recipe composes what it did before its launcher became Hydra's: key by key, but for named exceptions.

`results/recipe_configs_before.json.gz` has the configurations of the launcher of flags, for each recipe, variant and
smoke run (and several variants at once, where they touch the same keys), with placeholders for the checkout and for the
run's folder, and the options of the script that writes the rows. Nothing else reads it; it can be deleted.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_multiturn.launch.compose import compose_run, resolved
from verl_multiturn.launch.plan import RunPlan, plan_run
from verl_multiturn.launch.run import prepare_words

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = Path(__file__).parent / "results" / "recipe_configs_before.json.gz"
OUT = Path("/OUT")
OURS = "recipe."
"""Our own part of a configuration, which is new: where a run writes, and what the launcher does around the trainer."""
_NO_TOOL = "without a tool there is none to name, whatever the order of the variants"
EXCEPTIONS = {
    ("quickstart", "trainer.resume_mode"): "each run begins anew; before, the quickstart removed its folder",
    ("image_zoom+no_tool+qwen3_vl", "actor_rollout_ref.rollout.multi_turn.tool_config_path"): _NO_TOOL,
    ("image_zoom+no_tool+qwen3_vl", "data.tool_config_path"): _NO_TOOL,
    (
        "smollm2+megatron",
        "actor_rollout_ref.actor.fsdp_config.",
    ): "Megatron needs GPUs; the recipe is for a CPU",
}
"""By the beginning of a case's name, and that of a key: the reason of a difference that is meant."""


def cases() -> dict[str, dict[str, Any]]:
    """Return what was composed, by `RECIPE+VARIANT…[+smoke]`."""
    snapshot = json.loads(gzip.decompress(SNAPSHOT.read_bytes()))
    found = {}
    for name, case in snapshot["cases"].items():
        whole = snapshot["bases"][case["base"]] | case["set"]
        found[name] = {key: value for key, value in whole.items() if key not in case["gone"]}
    return found


def launch_of(name: str) -> RunPlan:
    """Return the launch that a case's name says."""
    recipe, *words = name.split("+")
    seed = next((int(word.removeprefix("seed=")) for word in words if word.startswith("seed=")), None)
    variants = [word for word in words if word != "smoke" and not word.startswith("seed=")]
    return plan_run(recipe, variants=variants, smoke="smoke" in words, seed=seed, out=OUT)


def flat(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, by their dotted keys."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def differences(name: str, before: Mapping[str, Any]) -> list[str]:
    """Return what differs from a case of the snapshot; exceptions that have a name are left out."""
    config = resolved(compose_run(launch_of(name)))
    text = json.dumps(config, default=str).replace(str(ROOT), "ROOT").replace(str(OUT), "OUT")
    now = {key: value for key, value in flat(json.loads(text)) if not key.startswith(OURS)}
    then = {key: value for key, value in before.items() if key != "(prepare)"}
    found = [
        f"{key}: {then.get(key, 'nothing')!r} before, {now.get(key, 'nothing')!r} now"
        for key in sorted(then.keys() | now.keys())
        if key not in then or key not in now or json.dumps(then[key]) != json.dumps(now[key])
        if not any(name.startswith(case) and key.startswith(named) for case, named in EXCEPTIONS)
    ]
    return found + _rows(name, before.get("(prepare)"), json.loads(text)["recipe"])


def _rows(name: str, before: list[str] | None, recipe: Mapping[str, Any]) -> list[str]:
    """Compare the options of the script that writes the rows; an option that was given twice counts once."""
    if before is None:
        return []
    smoke = ["--smoke"] if name.endswith("+smoke") else []
    tools = ["--tools", recipe["tools"]] if recipe["tools"] else []
    now = [recipe["prepare_data"], "--out", "OUT/data", *smoke, *tools, *prepare_words(recipe)]
    then, found = _options(before), _options(now)
    if recipe["name"] == "smollm2":
        found.pop("--seed", None)  # 0, the script's default, is now said
    return [] if then == found else [f"the rows: {then} before, {found} now"]


def _options(words: list[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {"": []}
    key = ""
    for word in words:
        if word.startswith("--"):
            key = word
            options.setdefault(key, [])
        elif word not in options[key] or key == "--splits":
            options[key].append(word)
    return options
