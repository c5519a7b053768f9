"""Settings are read as they are written; those that are gone are refused by name: with their value, or the reason."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import EchoTool
from verl_multiturn import ConfigError
from verl_multiturn.config import read_settings
from verl_multiturn.interactions.llm_user import LlmUser
from verl_multiturn.rewards.router import read_reward_kwargs
from verl_multiturn.tools.loading.call_limits import attach_limits
from verl_multiturn.tools.loading.registry import load_tools

TOOL = """
tools:
  - class_name: verl_multiturn.tools.{module}.{name}
    config: {{{own}, {gone}}}
"""


def load(folder: Path, module: str, name: str, own: str, gone: str) -> Any:
    (folder / "tools.yaml").write_text(TOOL.format(module=module, name=name, own=own, gone=gone))
    return load_tools(str(folder / "tools.yaml"))


def test_a_history_as_it_was_sampled_is_the_only_one() -> None:
    assert read_settings({"proxy": {"history": "sampled"}}) == read_settings({"proxy": {}})
    for value in ("rendered", "other", None):
        with pytest.raises(ConfigError, match=rf"multiturn\.proxy\.history={value!r}: earlier completions are"):
            read_settings({"proxy": {"history": value}})


def test_a_near_miss_of_a_gone_setting_is_told_what_became_of_it(tmp_path: Path) -> None:
    said = "did you mean 'max_connections'\\? 'max_connections' is gone: it is fixed at 64 in each worker; leave it out"
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, "retrieval", "RetrievalTool", "url: 'http://h'", "max_conections: 9")


@pytest.mark.parametrize(
    ("module", "name", "own", "gone", "said"),
    [
        (
            "retrieval",
            "RetrievalTool",
            "url: 'http://h'",
            "max_connections: 64",
            "connections=64: it is fixed at 64 ",
        ),
        (
            "code_service",
            "CodeServiceTool",
            "service: e2b, url: 'http://h'",
            "max_connections: 9",
            "connections=9: it is",
        ),
        (
            "browse_service",
            "BrowseServiceTool",
            "url: 'http://h'",
            "max_response_bytes: 5000",
            "max_response_bytes=5000: it is fixed at 2,000,000; leave it out",
        ),
        ("sql", "SqlTool", "root: '.'", "cell_characters: 9", "cell_characters=9: it is fixed at 200; leave it out"),
    ],
)
def test_settings_of_tools_that_are_constants(
    tmp_path: Path, module: str, name: str, own: str, gone: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, module, name, own, gone)


def test_other_settings_that_are_constants() -> None:
    with pytest.raises(ConfigError, match=r"limits\.backoff_s=0\.5: it is fixed at 0\.5 s; leave it out"):
        attach_limits(EchoTool(), {"retries": 1, "backoff_s": 0.5}, "limits")
    with pytest.raises(ConfigError, match=r"multiturn\.proxy\.harbor\.free_disk_gb=5: it is fixed at 10 GB; leave it"):
        read_settings({"proxy": {"harbor": {"free_disk_gb": 5}}})
    for name, value in (("connections", "32 in each reward worker"), ("short_words", "3")):
        with pytest.raises(ConfigError, match=rf"reward_kwargs\.judge\.{name}=1: it is fixed at {value}; leave it out"):
            read_reward_kwargs({"judge": {name: 1}})
    with pytest.raises(ConfigError, match=r"LlmUser: config\.connections=8: it is fixed at 64 in each worker; leave"):
        LlmUser({"base_url": "http://h/v1", "model": "m", "connections": 8})


def test_what_were_settings_of_our_estimators_are_their_options() -> None:
    """Folders of runs have them, and are still read."""
    before = {"gamma": 0.5, "weight": 2.0, "norm": "std", "across": "rows"}
    options = {"gamma": 0.5, "weight": 2.0, "std": True, "across_rows": True}
    assert read_settings({"advantage": before}).advantage.options == options
    assert read_settings({"advantage": {"norm": "mean", "across": "conversations", "options": {"gamma": 0.1}}}) == (
        read_settings({"advantage": {"options": {"gamma": 0.1, "std": False, "across_rows": False}}})
    )
    assert read_settings({"advantage": {"options": None}}) == read_settings({})
    with pytest.raises(ConfigError, match=r"advantage: gamma and options\.gamma are one setting; leave out gamma"):
        read_settings({"advantage": {"gamma": 0.5, "options": {"gamma": 0.5}}})
    with pytest.raises(ConfigError, match=r"advantage\.across='row': expected one of conversations, rows"):
        read_settings({"advantage": {"across": "row"}})
    with pytest.raises(ConfigError, match=r"advantage\.lambda: unknown setting"):
        read_settings({"advantage": {"lambda": 1, "options": {}}})


class Lossy(dict[str, Any]):
    """A mapping of somebody's own, whose pickled form is another one."""

    def __reduce__(self) -> Any:
        return (Lossy, ())


def test_settings_that_pickle_to_others_are_read_as_they_are() -> None:
    for weight in (0.3, 0.4):
        assert read_settings({"otc": Lossy(c=weight)}).otc.c == weight
