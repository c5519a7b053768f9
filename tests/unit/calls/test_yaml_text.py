"""Our YAML files are read by YAML 1.2: a text that looks like one is one."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_multiturn import ConfigError
from verl_multiturn.calls.loading.list_file import ListFile
from verl_multiturn.calls.loading.yaml_text import read_yaml, words_of_two_meanings

FILE = ListFile("things_path", "things", "write one", "thing", "rename one")


@pytest.mark.parametrize("word", ["no", "No", "NO", "yes", "on", "off", "y", "n", "tRue", "12:30", "190:20:30", "1_000",
                                  "0b11", "2024-05-01", "2001-12-14t21:59:43.10-05:00", "685_230.15", "=", "-", "1.2.3",
                                  "se", "+", ".", "1:2", "0o8", "x1"])  # fmt: skip
def test_what_looks_like_a_text_is_one(word: str) -> None:
    assert read_yaml(f"[{word}]") == [word]
    assert read_yaml(f"{word}: a") == {word: "a"}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("null", None),
        ("~", None),
        ("7", 7),
        ("-7", -7),
        ("+7", 7),
        ("014", 14),
        ("0o14", 12),
        ("0x1F", 31),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e-5", 1e-5),
        ("1.5E3", 1500.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
    ],
)
def test_numbers_and_words_of_the_core_schema(word: str, value: Any) -> None:
    (read,) = read_yaml(f"[{word}]")
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\n'a': 3", "the key 'a' is there twice"),
        ("- {1: a, 1: b}", "the key '1' is there twice"),
        ("a: &x [*x]", "a value holds itself"),
        ("a: &x\n  b: {c: *x}", "a value holds itself"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_no_file_may_hold(text: str, message: str) -> None:
    with pytest.raises(yaml.YAMLError, match=message):
        read_yaml(text)


def test_aliases_and_merges_stay() -> None:
    assert read_yaml("a: &x {k: 1}\nb: {<<: *x, k: 2}\nc: {<<: [*x], z: *x}") == {
        "a": {"k": 1},
        "b": {"k": 2},
        "c": {"k": 1, "z": {"k": 1}},
    }


def test_words_that_yaml_1_1_reads_otherwise() -> None:
    text = "a: [no, 'no', 12:30, 014, 14, 1e-5, text, true]\nb: {c: off, d: !!str off}"
    assert list(words_of_two_meanings(text)) == [
        (("a", 0), "no", False),
        (("a", 2), "12:30", 750),
        (("a", 3), "014", 12),
        (("b", "c"), "off", False),
        (("b", "d"), "off", False),
    ]


def entries(folder: Path, text: str) -> list[Any]:
    path = folder / "things.yaml"
    path.write_text(text)
    return FILE.entries(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "things: [{class_name: a.B, config: {mode: off}}]",
            "things[0].config.mode: 'off' is False in YAML 1.1, and not",
        ),
        (
            "things: [{class_name: a.B, config: {at: {x: [1, 12:30]}}}]",
            "things[0].config.at.x.1: '12:30' is 750 in YAML",
        ),
        (
            "things: [{class_name: verl_multiturn.a.B, config: {kwargs: {slow: on}}}]",
            "things[0].config.kwargs.slow: 'on'",
        ),
        ("things: [{toolset: a.b, config: {x: no}}]", "put it in quotes if it is a text, or write false"),
        ("things: [{a: 1, a: 2}]", "the key 'a' is there twice"),
        ("things: [{a: !!int abc}]", "is no valid YAML"),
    ],
)
def test_a_word_of_two_meanings_for_an_authors_code_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        entries(tmp_path, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("{class_name: verl_multiturn.a.B, config: {mode: off}}", {"config": {"mode": "off"}}),
        ("{class_name: a.B, config: {mode: 'off', on: false}}", {"config": {"mode": "off", "on": False}}),
        ("{class_name: a.B, note: no}", {"note": "no"}),
    ],
)
def test_a_word_that_is_clear(tmp_path: Path, text: str, entry: dict[str, Any]) -> None:
    (found,) = entries(tmp_path, f"things: [{text}]")
    assert {key: value for key, value in found.items() if key != "class_name"} == entry
