"""Settings of earlier versions are refused by name: with their fixed value, or with the reason why they are gone."""

import pytest

from verl_multiturn import ConfigError
from verl_multiturn.config import read_settings


def test_a_history_as_it_was_sampled_is_the_only_one() -> None:
    assert read_settings({"proxy": {"history": "sampled"}}) == read_settings({"proxy": {}})
    for value in ("rendered", "other", None):
        with pytest.raises(
            ConfigError, match=rf"multiturn\.proxy\.history={value!r}: earlier completions are shown as"
        ):
            read_settings({"proxy": {"history": value}})
