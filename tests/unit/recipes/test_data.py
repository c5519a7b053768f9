"""Data sets: files and splits in, verl's parquet out."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml

from tests.conftest import ROOT
from verl_multiturn.errors import ConfigError
from verl_multiturn.runs.data import arguments, hold_out, make_row, read_splits, seed_option, tool_call, write_rows

GSM8K = ROOT / "tool_configs" / "gsm8k.yaml"
KWARGS = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}}


def test_a_row_has_verls_columns() -> None:
    row = make_row("a/b", "2+2?", "4", system="Count.", ability="math", tools_kwargs=KWARGS, question="2+2?")
    assert row == {
        "data_source": "a/b",
        "ability": "math",
        "prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "2+2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"question": "2+2?", "need_tools_kwargs": True, "tools_kwargs": KWARGS},
    }


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        (None, "prompt=None"),
        (3, "prompt=3"),
        (b"2+2?", "prompt=b'2+2?'"),
        ({"role": "user", "content": "2+2?"}, "prompt={'role': 'user'"),
        (["2+2?"], "message 0='2+2?'"),
        ([{"role": "user", "content": "a"}, None], "message 1=None"),
    ],
)
def test_what_is_no_prompt_is_refused_with_what_to_do(prompt: Any, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_row("a/b", prompt, "4", interaction="user")
    assert str(caught.value).startswith(f"a row of 'a/b': {given}")
    assert 'where the interaction speaks first, give what stands before that: a message with the role "system"' in str(
        caught.value
    )


def test_where_the_interaction_speaks_first_a_system_message_is_a_prompt() -> None:
    system = {"role": "system", "content": "Count."}
    for row in (
        make_row("a/b", [system], "4", interaction="user"),
        make_row("a/b", [], "4", system="Count.", interaction="user"),
    ):
        assert row["prompt"] == [system]


def test_a_structured_truth_is_json_and_tools_are_selected() -> None:
    row = make_row("qa", [{"role": "user", "content": "Who?"}], ["Ada", "Ångström"], tools=["search"])
    assert row["reward_model"]["ground_truth"] == '["Ada", "Ångström"]'
    assert row["extra_info"] == {"tool_selection": ["search"]}
    assert row["prompt"] == [{"role": "user", "content": "Who?"}]


def test_a_call_is_written_as_hermes_models_do() -> None:
    assert tool_call("f", {"x": "ü"}) == '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>'


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_rows_of_one_file_are_held_out(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(40)]
    path = tmp_path / f"all{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    elif suffix == ".csv":
        path.write_text("question,answer\n" + "".join(f"q{i},{i}\n" for i in range(40)))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    train = [row for i, row in enumerate(rows) if i not in (10, 30)]
    assert read_splits(str(path)) == {"train": train, "test": [rows[10], rows[30]]}
    assert read_splits(str(path), held_out=0.0) == {"train": rows, "test": []}


def test_pictures_of_the_hub_stay_encoded_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from PIL import Image

    features = datasets.Features({"images": datasets.Sequence(datasets.Image()), "problem": datasets.Value("string")})
    columns = {"images": [[Image.new("RGB", (8, 8))]] * 10, "problem": [f"p{i}" for i in range(10)]}
    made = datasets.Dataset.from_dict(columns, features=features)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or made)
    splits = read_splits("some/pictures", splits=("train", "train"), held_out=0.2)
    assert asked == [(("some/pictures", None), {"split": "train"})]
    assert [row["problem"] for row in splits["test"]] == ["p2", "p7"]
    assert [row["problem"] for row in splits["train"][:3]] == ["p0", "p1", "p3"]
    assert len(splits["train"]) == 8
    (picture,) = splits["train"][-1]["images"]
    assert picture["bytes"].startswith(b"\x89PNG")
    assert splits["train"][:2] == [splits["train"][0], splits["train"][1]]


def test_what_the_hub_keeps_as_json_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    rows = [{"a": {"x": 1}, "t": [{"n": 1}]}, {"a": {"x": "one"}, "t": [{"m": [None]}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: made)
    assert list(read_splits("some/rows", splits=("train", "train"), held_out=0)["train"]) == rows


@pytest.mark.parametrize(("size", "share", "test"), [(40, 0.05, [10, 30]), (3, 0.9, [0, 2]), (2, 0.01, [1])])
def test_some_are_held_out_and_some_are_left(size: int, share: float, test: list[int]) -> None:
    assert hold_out(size, share) == ([i for i in range(size) if i not in test], test)


@pytest.mark.parametrize("rows", ["", '{"a": 1}'])
def test_what_cannot_be_parted_is_refused(tmp_path: Path, rows: str) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match=r"rows.jsonl': [01] rows cannot be parted .*; give two or more"):
        read_splits(str(tmp_path / "rows.jsonl"))


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "dev.jsonl").write_text('{"a": 2}\n')
    assert read_splits(str(tmp_path), splits=("train", "dev")) == {"train": [{"a": 1}], "test": [{"a": 2}]}
    with pytest.raises(ConfigError, match=r"no file for the split 'test'; expected one of test\.parquet"):
        read_splits(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.jsonl", "{", "cannot be read"),
        ("rows.txt", "x", r"expected one of \*\.parquet, \*\.jsonl, \*\.json, \*\.csv"),
        ("none.jsonl", None, "no such file"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_splits(str(tmp_path / name))


def both_tools(folder: Path) -> Path:
    entries = [yaml.safe_load(path.read_text())["tools"][0] for path in (GSM8K, GSM8K.with_name("calculator.yaml"))]
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": entries}))
    return path


def test_rows_of_several_tasks_keep_their_arguments(tmp_path: Path) -> None:
    first = make_row("openai/gsm8k", "2+2?", "4", tools_kwargs=KWARGS)
    second = make_row("qa", "Who?", ["Ada"], tools=["calculator"])
    write_rows(tmp_path, {"train": [first, second]}, both_tools(tmp_path))
    read = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["extra_info"]["tools_kwargs"] for row in read] == [KWARGS, None]
    assert [row["extra_info"]["index"] for row in read] == [0, 1]
    assert {row["extra_info"]["split"] for row in read} == {"train"}


def test_rows_that_do_not_fit_the_tools_are_refused(tmp_path: Path) -> None:
    wrong = make_row("openai/gsm8k", "2+2?", "4", tools_kwargs={"calculator": {"create_kwargs": {"x": 1}}})
    right = make_row("openai/gsm8k", "2+2?", "4", tools_kwargs=KWARGS)
    with pytest.raises(ConfigError, match="1 of 1 rows cannot work:\nrow 0: tools_kwargs names 'calculator'"):
        write_rows(tmp_path, {"train": [right], "test": [wrong]}, GSM8K)
    # The new files stay apart, so that no run trains on half of them by accident.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new-test.parquet", "new-train.parquet"]
    with pytest.raises(ConfigError, match="the split 'test' has no rows"):
        write_rows(tmp_path, {"test": []})


def test_rows_that_do_not_fit_in_a_file_are_refused(tmp_path: Path) -> None:
    empty = make_row("qa", "Who?", "Ada", tools_kwargs={})
    with pytest.raises(ConfigError, match=r"'train' do not fit in a parquet file: .* a dictionary at least one key"):
        write_rows(tmp_path, {"train": [empty]})
    mixed = [make_row("qa", "Who?", "Ada", year=1815), make_row("qa", "Who?", "Ada", year="?")]
    with pytest.raises(ConfigError, match="a column has one type in all rows"):
        write_rows(tmp_path, {"train": mixed})


def test_a_row_chooses_an_interaction() -> None:
    row = make_row("maze", "Go.", "", interaction="maze", interaction_kwargs={"seed": 3})
    assert row["extra_info"] == {"interaction_kwargs": {"maze": {"seed": 3}}}
    assert make_row("maze", "Go.", "", interaction="maze")["extra_info"] == {"interaction_kwargs": {"name": "maze"}}
    with pytest.raises(ConfigError, match="name it in `interaction`"):
        make_row("maze", "Go.", "", interaction_kwargs={"seed": 3})


def test_every_script_takes_the_seed_that_a_recipe_passes(capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments("Rows.", None)
    assert parser.parse_args(["--out", "data"]).seed == 0
    assert parser.parse_args(["--out", "data", "--seed", "7"]).seed == 7
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", "data", "--seed", "-1"])
    assert "expected a seed from 0 to" in capsys.readouterr().err
    parser.add_argument("--seed", type=seed_option, default=42)  # of a script that has its own
    assert parser.parse_args(["--out", "data"]).seed == 42
