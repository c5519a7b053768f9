"""Reads from τ²'s package, and refusals before a run."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from verl_multiturn import ConfigError, load_tools
from verl_multiturn.task_sets.tau2.package import check_domain, splits_of, tasks_of
from verl_multiturn.task_sets.tau2.user import TauUser

pytestmark = pytest.mark.slow  # its import takes more than a second


def test_what_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
    for domain, hint in [
        ("telecom", "its user has tools of its own"),
        ("retial", "did you mean 'retail'"),
        (3, "known"),
    ]:
        with pytest.raises(ConfigError, match=rf"TauUser: config\.domain: .*is no domain of τ².*{hint}") as refused:
            TauUser({**user, "domain": str(domain)})
        assert "telecom" in str(refused.value) or domain != "telecom"
    (tmp_path / "tools.yaml").write_text(
        "tools: [{toolset: verl_multiturn.task_sets.tau2.tools.domain_tools, config: {domain: telecom}}]"
    )
    with pytest.raises(ConfigError, match="'telecom' is no domain of τ²"):
        load_tools(tmp_path / "tools.yaml")
    with pytest.raises(ConfigError, match=r"TauUser: config\.base_url"):
        TauUser({"base_url": "ftp://x", "model": "m", "domain": "retail"})

    find = importlib.util.find_spec
    for missing in ("tau2", "deepdiff"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, but=missing: None if name == but else find(name))
        with pytest.raises(
            ConfigError, match=rf"{missing!r}, which is not installed; {sys.executable} -m pip install --no-deps nvidia"
        ):
            check_domain("retail", "here")


def test_tau2_is_imported_without_its_noise(capfd: pytest.CaptureFixture[str]) -> None:
    """It reads no `.env` file, writes nothing, and brings in no client of models."""
    assert len(tasks_of("retail")) == 114
    assert {name: len(ids) for name, ids in splits_of("airline").items()} == {"train": 30, "test": 20, "base": 50}
    assert capfd.readouterr() == ("", "")
    assert "PYTHON_DOTENV_DISABLED" not in os.environ
    assert not {"litellm", "tau2.registry"} & set(sys.modules)
