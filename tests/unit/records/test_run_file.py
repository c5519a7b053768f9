"""Parts of its configuration that a run's file has, and parts that it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_multiturn.records.write.configuration_secrets import without_secrets
from verl_multiturn.records.write.run_file import digest_of_vocabulary, new_start, path_of, write_whole


def test_a_start_orders_by_time_and_holds_no_dash() -> None:
    first, second = new_start(1_790_000_000.0), new_start(1_790_000_001.0)
    assert first.startswith("20260921T141320_")
    assert first < second
    assert "-" not in first
    assert new_start(0.0) != new_start(0.0)


@pytest.mark.parametrize(
    "key",
    ["api_key", "apiKey", "OPENAI_API_KEY", "hf_token", "HF_TOKEN", "authToken", "password", "db-password", "secret",
     "client_secret", "aws_secret_access_key", "private_key", "Authorization", "credentials", "tokens", "cookie",
     "jwt", "session", "webhook", "webhook_url", "slackWebhookURL", "bearer", "sentry_dsn", "connection_string",
     "connectionString", "sas", "sasUrl", "X-Amz-Signature", "x-amz-security-token", "otp", "pin", "credential",
     "passphrase", "salt", "session_id", "HFToken", "APIKey", "oauth2", "creds", "signature", "set-cookie",
     "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "OPENAI_KEY", "GITHUB_PAT", "AUTH", "api_keys", "openai_key", "mapsKey"],
)  # fmt: skip
def test_a_secret_is_hidden_wherever_it_is(key: str) -> None:
    assert without_secrets({"a": [{key: "abc"}]}) == {"a": [{key: "***"}]}
    assert without_secrets({key: ["abc", "def"]}) == {key: ["***", "***"]}
    assert without_secrets({key: {"openai": "abc", "all": [{"more": "def"}], "count": 3}}) == {
        key: {"openai": "***", "all": [{"more": "***"}], "count": 3}
    }


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
        "data": {"prompt_key": "prompt", "reward_fn_key": "data_source", "image_key": "images", "video_key": None},
        "algorithm": {"gdpo_reward_keys": ["a", "b"]},
        "compass": "north",
        "session_length_s": "60",
        "session_timeout": "1 m",
        "pin_memory": "yes",
        "signature_columns": ["a"],
        "signature_version": "s3v4",
        "authority": "x",
        "eos_token": "</s>",
        "model": {"pad_token": "<pad>", "image_token": "<image>", "special_tokens": ["<a>"], "stop_tokens": ["</s>"]},
        "hooks": ["my.module.hook"],
        "spin": "up",
        "salted": "no",
        "cookie_policy": "lax",
        "names": "hf_rollout hf_tokenizer sk-learn eyJ xoxo AKIA",
        "place": "https://host:8000/@me/x@y",
        "paths": "https://pkg.dev/@scope/name?step=3&mode=a#key",
        "said": "session: three people, password: none given",
        "author": "me",
        "command": ["serve", "--max-tokens", "64", "--token", "--verbose", "lr=1e-5", "max_tokens=64", "a==b"],
        "override": "data.prompt_key=question",
    }
    assert without_secrets(plain) == plain


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://me:pw@host/x", "https://***@host/x"),
        ("postgres://me@host/db", "postgres://***@host/db"),
        ("postgres://u:p@ss@h/db", "postgres://***@h/db"),
        ("postgres://u:p/s?s#@s@h:5432/db", "postgres://***@h:5432/db"),
        ("postgresql+psycopg2://u:@:@h/db?sslmode=require", "postgresql+psycopg2://***@h/db?sslmode=require"),
        ("redis://:pa@ss@h:6379/0 then https://h:80/x", "redis://***@h:6379/0 then https://h:80/x"),
        (
            "https://h/?X-Amz-Credential=abc&X-Amz-Signature=d&n=1",
            "https://h/?X-Amz-Credential=***&X-Amz-Signature=***&n=1",
        ),
        ("https://h/#access_token=abc", "https://h/#access_token=***"),
        ("https://h/?sv=2020&sig=a%2Fb", "https://h/?sv=2020&sig=***"),
        ("https://h/?jwt=abc&session=def&code=x", "https://h/?jwt=***&session=***&code=***"),
        ("https://hooks.slack.com/services/T0/B0/abc", "https://hooks.slack.com/***"),
        ("https://discord.com/api/webhooks/1/abc", "https://discord.com/api/webhooks/***"),
        ("https://api.telegram.org/bot123:abc/send", "https://api.telegram.org/bot/***"),
        ("use hf_SECRETSECRET", "use ***"),
        ("sk-proj-Abcdef0123456789 and ghp_0123456789abcdefghij", "*** and ***"),
        ("AKIAIOSFODNN7EXAMPLE xoxb-123456-abcdef", "*** ***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- x", "*** x"),
        ("-----BEGIN PRIVATE KEY-----\nMII", "***"),
        ("curl -u me:pw https://h", "curl -u me:*** https://h"),
        ("curl --user='me:p w' h", "curl --user='me:***' h"),
        ("Cookie: sid=abc; csrftoken=def", "Cookie: ***"),
        ('{"password": "a b", "n": 1}', '{"password": ***, "n": 1}'),
        ("{'jwt': 'a'}", "{'jwt': ***}"),
        ("Server=h;Password=abc;SharedAccessKey=d==", "Server=h;Password=***;SharedAccessKey=***"),
        ("http://host/?api_key=abc&q=1", "http://host/?api_key=***&q=1"),
        ("http://host/?q=1&access_token=abc", "http://host/?q=1&access_token=***"),
        ("curl -H 'Authorization: Bearer abcdef.ghi'", "curl -H 'Authorization: Bearer ***'"),
        ("mail me@host", "mail me@host"),
        ("serve --api-key abc --port 80", "serve --api-key *** --port 80"),
        ("serve --token=abc --password 'a b'", "serve --token=*** --password ***"),
        ("OPENAI_KEY=abc PGPASSWORD=def run", "OPENAI_KEY=*** PGPASSWORD=*** run"),
        ("++tools.api_key=abc", "++tools.api_key=***"),
        ("curl -H 'Authorization: abc' -H 'X-Api-Key: def' u", "curl -H 'Authorization: ***' -H 'X-Api-Key: ***' u"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("serve --max-tokens 64 --token --verbose", "serve --max-tokens 64 --token --verbose"),
    ],
)
def test_a_secret_within_a_text_is_hidden(text: str, hidden: str) -> None:
    assert without_secrets({"command": text}) == {"command": hidden}


def test_a_key_names_a_column_below_data_alone() -> None:
    given = {"data": {"prompt_key": "prompt", "maps_key": "a-1", "api_key": "abc"}, "tool": {"prompt_key": "prompt"}}
    assert without_secrets(given) == {
        "data": {"prompt_key": "prompt", "maps_key": "***", "api_key": "***"},
        "tool": {"prompt_key": "***"},
    }


def test_options_in_a_list_are_hidden() -> None:
    given = [
        "serve",
        "--api-key",
        "abc",
        "--token=abc",
        "OPENAI_KEY=abc",
        "-H",
        "X-Api-Key: abc",
        "--port",
        "80",
        "-u",
        "me:pw",
        "--user",
        "me",
    ]
    hidden = ["serve", "--api-key", "***", "--token=***", "OPENAI_KEY=***", "-H", "X-Api-Key: ***", "--port", "80"]
    hidden += ["-u", "***", "--user", "me"]
    assert without_secrets({"command": given}) == {"command": hidden}


def test_the_key_may_stand_beside_its_value() -> None:
    given = {"headers": [["Authorization", "abc"], ["Accept", "x"]], "env": [{"name": "HF_TOKEN", "value": "abc"}]}
    assert without_secrets(given) == {
        "headers": [["Authorization", "***"], ["Accept", "x"]],
        "env": [{"name": "HF_TOKEN", "value": "***"}],
    }
    plain = {"shapes": [["a", "b"]], "env": [{"name": "LANG", "value": "C"}], "none": [], "limits": [["token", 3]]}
    assert without_secrets(plain) == plain


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


@pytest.mark.parametrize(
    "unit", ["a", "a-", "a.", "a://b:", "eyJ-", "--a ", "?a", "-u a:", "sk-A", '"a', "x-", "@:", "cookie:"]
)
def test_a_long_text_of_a_stranger_takes_no_long_time(unit: str) -> None:
    """A rule that is quadratic in it would take hours."""
    text = unit * (300_000 // len(unit))
    assert len(str(without_secrets(text))) > 0
