"""The configuration in a run's folder is data: references within it, and nothing from outside."""

import os
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.trust.settings import HYDRA, as_texts, read_settings, resolve_references


def test_references_are_replaced() -> None:
    found = resolve_references({
        "a": {"b": 1, "sibling": "${.b}", "above": "${..e}", "text": "x${a.sibling}y"},
        "e": [2, "${a.b}"], "item": "${e[1]}", "whole": "${a}",
        "selected": "${oc.select:a.b,5}", "default": "${oc.select:zz,5}", "null": "${oc.select:zz,null}",
        "list": "${oc.select:zz,[]}", "nested": "${oc.select:zz,${oc.select:a.b,False}}", "none": "${oc.select:zz}",
    })  # fmt: skip
    assert found["a"] == {"b": 1, "sibling": 1, "above": [2, 1], "text": "x1y"}
    assert found["whole"] == found["a"]
    names = ("item", "selected", "default", "null", "list", "nested", "none")
    assert [found[name] for name in names] == [1, 1, 5, None, [], 1, None]


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:A}", "${oc.env:A,b}", "x ${oc.env:A}", "${oc.decode:1}", "${oc.create:{a: 1}}",
        "${hydra:runtime.cwd}",
        "${theirs:1}", "${oc.select:zz,${oc.env:A}}", "${a.${oc.env:A}}", "${nowhere}", "${self}", "${one}", "${",
        "$${x}", "\\${oc.env:A}", "${oc.select:zz,&a [*a]}", "${oc.dict.keys:a}", "${oc.deprecated:a}",
    ],
)  # fmt: skip
def test_all_else_stays_a_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "secret")
    found = resolve_references({"self": text, "one": "${two}", "two": "${one}", "again": "${self}", "a": {}})
    assert found["self"] in (text, "${two}", "${one}")
    assert "secret" not in str(found)


def write(run: Path, text: str) -> Path:
    (run / HYDRA).parent.mkdir(parents=True)
    (run / HYDRA).write_text(text)
    return run


def test_a_configuration_does_not_grow(tmp_path: Path) -> None:
    doubled: dict[str, Any] = {"a0": "x" * 1000} | {f"a{i + 1}": f"${{a{i}}}${{a{i}}}" for i in range(40)}
    assert resolve_references(doubled) == doubled
    nested: dict[str, Any] = {"a0": [1]} | {f"a{i + 1}": [f"${{a{i}}}"] * 9 for i in range(40)}
    assert resolve_references(nested) == nested
    laughs = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12))
    assert read_settings(write(tmp_path / "aliases", laughs)) == {}
    assert read_settings(write(tmp_path / "deep", "[" * 200_000)) == {}
    assert read_settings(write(tmp_path / "large", "a: b\n" + "# " * 200_000)) == {}
    assert read_settings(write(tmp_path / "object", "a: !!python/object/apply:os.getcwd []\n")) == {}


def test_only_a_plain_file_of_the_folder_is_read(tmp_path: Path) -> None:
    write(tmp_path / "other", "a: 1\n")
    assert read_settings(tmp_path / "other") == {"a": 1}
    (tmp_path / "run" / HYDRA).parent.mkdir(parents=True)
    (tmp_path / "run" / HYDRA).symlink_to(tmp_path / "other" / HYDRA)
    assert read_settings(tmp_path / "run") == {}
    (tmp_path / "run" / HYDRA).unlink()
    os.mkfifo(tmp_path / "run" / HYDRA)
    assert read_settings(tmp_path / "run") == {}
    assert read_settings(tmp_path / "nothing") == {}


@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"\${a}", r"a\\${b}", "x${y", "${", "$${a}", "${a}${b}", "plain"])
def test_texts_are_read_as_they_stand(text: str) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(as_texts({"a": {"b": [text]}}))
    assert omegaconf.OmegaConf.to_container(config, resolve=True) == {"a": {"b": [text]}}
