"""Copies of Hydra's files that tests keep: they equal Hydra's reads, and a file that has changed is read again."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.support.warm_python import light_python
from verl_multiturn.recipes import copy_recipe
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import plan_run

READ = """
import json, pathlib, sys
from omegaconf import OmegaConf
from verl_multiturn.runs.compose import compose_run, resolved
from verl_multiturn.runs.plan import plan_run
for name, out, variants, words in json.loads(sys.argv[1]):
    config = compose_run(plan_run(name, out=pathlib.Path(out), variants=variants, overrides=words))
    print(OmegaConf.to_yaml(config), resolved(config), sep="")
"""


def test_what_is_kept_is_what_hydra_reads(tmp_path: Path) -> None:

    runs = [
        ("otc", [], ["data.seed=3", "mt.filter=skip", "+a.b={x: 1}"]),
        ("otc", ["search"], ["~trainer.project_name", "trainer={nnodes: 2}"]),
        ("otc", ["search"], ["data.seed=4", "+a=1"]),
        ("otc", [], []),
        ("otc", ["search"], ["+a=1", "data.seed=4"]),
    ]
    given = [(name, str(tmp_path / "out"), variants, words) for name, variants, words in runs]
    done = subprocess.run(
        [light_python(), "-c", READ, json.dumps(given)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    said = ""
    for name, out, variants, words in given:
        config = compose_run(plan_run(name, out=Path(out), variants=variants, overrides=words))
        said += f"{OmegaConf.to_yaml(config)}{resolved(config)}\n"
    assert said == done.stdout


@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_that_changes_is_read_again(tmp_path: Path, is_new: bool) -> None:
    copied = copy_recipe("otc", tmp_path)

    def composed(*words: str) -> object:
        config = compose_run(plan_run(str(copied), variants=["search"], overrides=words))
        return config.data.seed, config.recipe.get("later")

    before = composed("data.seed=5")
    variant, text = copied / "variant" / "search.yaml", "# @package _global_\nrecipe: {later: other}\n"
    if is_new:  # in a folder that comes first
        shutil.rmtree(variant.parent)
        variant.parent.mkdir()
    variant.write_text(text, encoding="utf-8")
    assert before == (5, None)
    assert composed("data.seed=6") == (6, "other")
