"""What a run's file says of its configuration, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.records.run_file import (
    digest_of_vocabulary,
    new_start,
    path_of,
    without_secrets,
    write_whole,
)


def test_a_start_orders_by_time_and_holds_no_dash() -> None:
    first, second = new_start(1_790_000_000.0), new_start(1_790_000_001.0)
    assert first.startswith("20260921T141320_")
    assert first < second
    assert "-" not in first
    assert new_start(0.0) != new_start(0.0)


@pytest.mark.parametrize(
    "key",
    ["api_key", "apiKey", "OPENAI_API_KEY", "hf_token", "HF_TOKEN", "authToken", "password", "db-password", "secret",
     "client_secret", "aws_secret_access_key", "private_key", "Authorization", "credentials", "tokens", "cookie"],
)  # fmt: skip
def test_a_secret_is_hidden_wherever_it_is(key: str) -> None:
    assert without_secrets({"a": [{key: "abc"}]}) == {"a": [{key: "***"}]}
    assert without_secrets({key: ["abc", "def"]}) == {key: ["***", "***"]}


def test_what_is_no_secret_stays() -> None:
    plain: dict[str, Any] = {
        "max_tokens": 64,
        "token": None,
        "api_key": "",
        "tokenizer": "Qwen/Qwen3",
        "token_level": "sum",
        "loss_agg_mode": "token-mean",
        "keys": ["a", "b"],
        "url": "https://host:8000/path?step=3#place",
        "monkey": "see",
    }
    assert without_secrets(plain) == plain


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ("postgres://me@host/db", "postgres://***@host/db"),
        ("http://host/?api_key=abc&q=1", "http://host/?api_key=***&q=1"),
        ("http://host/?q=1&access_token=abc", "http://host/?q=1&access_token=***"),
        ("curl -H 'Authorization: Bearer abcdef.ghi'", "curl -H 'Authorization: Bearer ***'"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_a_secret_within_a_text_is_hidden(text: str, hidden: str) -> None:
    assert without_secrets({"command": text}) == {"command": hidden}


def test_the_digest_of_a_vocabulary_ignores_its_order() -> None:
    assert digest_of_vocabulary({"a": 0, "b": 1}) == digest_of_vocabulary({"b": 1, "a": 0})
    assert digest_of_vocabulary({"a": 0, "b": 1}) != digest_of_vocabulary({"a": 1, "b": 0})


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = path_of(tmp_path / "records", "s")
    write_whole(path, json.dumps({"a": 1}))
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud83d")
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in path.parent.iterdir()] == ["run-s.json"]
