"""Data of the recipes with tools: made rows are played through the real tools, rows of public sets are converted."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml

from tests.conftest import ROOT
from tests.recipe_scripts import RECIPES, composed, prepared, script
from tests.support.warm_python import light_python
from verl_multiturn import ConfigError
from verl_multiturn.interactions.old_verl.classes import AdaptedInteraction
from verl_multiturn.interactions.running.registry import interaction_of_row, load_interactions
from verl_multiturn.rewards import aclose, compute_score
from verl_multiturn.runs.data import write_rows
from verl_multiturn.tools.image_zoom import read_image
from verl_multiturn.tools.loading.kwargs import bind_kwargs, read_tools_kwargs
from verl_multiturn.tools.loading.registry import load_tools

pytestmark = pytest.mark.slow

IN_TEXT = ["search_r1", "text2sql", "mixed"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the smoke data of each recipe, as its script writes them."""
    folder = tmp_path_factory.mktemp("made")
    for name in [*IN_TEXT, "image_zoom"]:
        prepared(name, folder / name, "--smoke")
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(path).to_pylist())


def rows_of(folder: Path) -> list[dict[str, Any]]:
    train, test = read(folder / "train.parquet"), read(folder / "test.parquet")
    assert (len(train), len(test)) == (8, 4)
    return [*train, *test]


def tools_of(row: dict[str, Any]) -> list[str]:
    info = row["extra_info"]
    return info.get("tool_selection") or list(read_tools_kwargs(info["tools_kwargs"], "row"))


async def play(row: dict[str, Any], tools: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Play a demonstration's calls, and return the tools' answers and names."""
    kwargs = read_tools_kwargs(row["extra_info"].get("tools_kwargs"), "row")
    answers, names = [], []
    for turn in row["extra_info"]["demonstration"]:
        _, called, rest = turn.partition("<tool_call>\n")
        if not called:
            continue
        call = json.loads(rest.removesuffix("\n</tool_call>"))
        tool = tools[call["name"]]
        given = bind_kwargs(tool, "create", kwargs.get(call["name"], {}).get("create_kwargs", {}), "row")
        await tool.create("one", **given)
        answered = await tool.execute("one", call["arguments"])
        await tool.release("one")
        answers.append((answered[0] if isinstance(answered, tuple) else answered).text)
        names.append(call["name"])
    return answers, names


async def score(row: dict[str, Any], texts: list[str], folder: Path) -> float:
    info = {**row["extra_info"], "assistant_texts": texts, "assistant_calls": [], "call_statuses": []}
    truth = row["reward_model"]["ground_truth"]
    kwargs = {"sql": {"root": str(folder / "databases")}} if (folder / "databases").is_dir() else {}
    return (await compute_score(row["data_source"], "", truth, info, **kwargs))["score"]


@pytest.mark.parametrize("name", IN_TEXT)
async def test_the_demonstrations_are_right(made: Path, name: str) -> None:
    folder = made / name
    tools = load_tools(folder / "tools.yaml")
    for row in rows_of(folder):
        said = row["extra_info"]["demonstration"]
        answers, names = await play(row, tools)
        assert set(names) == set(tools_of(row)), row
        assert len(said) == len(answers) + 1
        assert not [answer for answer in answers if "rror" in answer or "No document" in answer], answers
        assert await score(row, said, folder) == 1.0, row
        assert await score(row, [*said[:-1], "I do not know."], folder) == 0.0, row
    await aclose()


async def test_the_demonstrations_say_what_the_tools_found(made: Path) -> None:
    folder = made / "search_r1"
    tools = load_tools(folder / "tools.yaml")
    for row in rows_of(folder):
        answers, _ = await play(row, tools)
        river = json.loads(row["reward_model"]["ground_truth"])["target"][0]
        assert [answer.startswith("[1] ") for answer in answers] == [True, True]
        town = answers[0].removesuffix(".").rpartition(" ")[2]
        assert town in row["extra_info"]["demonstration"][1]
        assert answers[1] == f"[1] {town}\nThe river {river} flows through {town}."


async def test_wrong_answers_of_made_rows(made: Path) -> None:
    wrong = {"searchR1_hotpotqa": "<answer>Nile</answer>", "synsql": "<solution>SELECT 42</solution>",
             "openai/gsm8k": "#### 0", "reasoning_gym/gcd": "<answer>0</answer>"}  # fmt: skip
    rows = rows_of(made / "mixed")
    assert {row["data_source"] for row in rows} == set(wrong)
    for row in rows:
        assert await score(row, [wrong[row["data_source"]]], made / "mixed") == 0.0
    await aclose()


def test_a_mixed_file_keeps_each_rows_tools(made: Path) -> None:
    rows = read(made / "mixed" / "train.parquet")
    assert [tools_of(row) for row in rows[:4]] == [["calc_gsm8k_reward"], ["search"], ["sql"], ["python"]]
    kwargs = [read_tools_kwargs(row["extra_info"]["tools_kwargs"], "row") for row in rows[:4]]
    assert kwargs == [
        {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "6"}}},
        {},
        {"sql": {"create_kwargs": {"db_path": "farm.sqlite"}}},
        {},
    ]
    assert [bool(row["extra_info"]["need_tools_kwargs"]) for row in rows[:4]] == [True, False, True, False]
    from verl_multiturn.rewards.router import find_reward

    found = [find_reward(row["data_source"], {}) for row in rows[:4]]
    assert found == ["gsm8k", "qa", "sql", "reasoning_gym"]


async def test_pictures_and_the_tool(made: Path) -> None:
    folder = made / "image_zoom"
    tool = load_tools(folder / "tools.yaml")["image_zoom"]
    prepare = script("image_zoom")
    # There are three pictures of each of four widths, so that no four rows have one width alone.
    widths = [read_image(row["images"][0]).size[0] for row in rows_of(folder)]
    assert sorted(widths) == [112] * 3 + [140] * 3 + [168] * 3 + [196] * 3
    for row in rows_of(folder):
        (path,) = row["images"]
        assert row["extra_info"]["tools_kwargs"]["image_zoom"]["create_kwargs"]["image"] == path
        system, user = (message["content"] for message in row["prompt"])
        assert '"name": "image_zoom"' in system
        assert '"bbox_2d"' in system
        assert user.startswith("<image>How many ")
        truth = row["reward_model"]["ground_truth"]
        said = prepare.demonstration(int(truth))
        call = json.loads(said[0].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        await tool.create("one", image=path)
        answered = await tool.execute("one", call["arguments"])
        await tool.release("one")
        (shown,) = answered.image
        # The picture shows as many squares of 400 colored pixels as in the truth, all of them in the region.
        colored = sum(count for count, color in shown.getcolors() if color != (255, 255, 255))
        assert (shown.size, colored) == ((112, 56), 400 * int(truth))
        assert await score(row, said, folder) == 1.0
        assert await score(row, [said[0], "\\boxed{4}"], folder) == 0.0
    await aclose()


def test_a_pictures_sides_fit_the_models_squares() -> None:
    from PIL import Image

    in_blocks = script("image_zoom").in_blocks
    assert in_blocks(Image.new("RGB", (300, 199))).size == (308, 196)
    assert in_blocks(Image.new("RGB", (10, 56))).size == (28, 56)


def test_rows_of_geometry3k_and_deepeyes(tmp_path: Path) -> None:
    from PIL import Image

    prepare = script("image_zoom")
    tools = ROOT / "tool_configs" / "image_zoom.yaml"
    Image.new("RGB", (60, 60), "red").save(tmp_path / "x.png")
    raw = {"bytes": (tmp_path / "x.png").read_bytes(), "path": None}
    geometry = {"images": [raw], "problem": "<image>Find $x$.", "answer": "3"}
    row = prepare.row(geometry, tmp_path / "g.png", None)
    assert row["data_source"] == "hiyouga/geometry3k"
    assert row["prompt"][1]["content"] == "<image>Find $x$."
    assert row["prompt"][0]["content"].endswith("Give the answer in \\boxed{}.")
    assert row["reward_model"]["ground_truth"] == "3"
    assert read_image(row["images"][0]).size == (56, 56)

    user = "<image>\nIs the kite red?\nThink first, call **image_zoom_in_tool** if needed, then answer."
    theirs = {
        "data_source": "vstar",
        "prompt": [{"role": "system", "content": "# Tools ..."}, {"role": "user", "content": user}],
        "images": [raw],
        "reward_model": {"ground_truth": "Yes, it is.", "style": "model"},
        "extra_info": {"question": "Is the kite red?"},
        "env_name": "visual_toolbox_v2",
    }
    row = prepare.row(theirs, tmp_path / "d.png", tools)
    assert row["data_source"] == "deepeyes/vstar"
    assert row["prompt"][1]["content"] == "<image>Is the kite red?"
    assert "image_zoom_in_tool" not in str(row)
    write_rows(tmp_path / "out", {"train": [row]}, tools)
    with pytest.raises(ConfigError, match="one picture each"):
        prepare.row({**geometry, "images": []}, tmp_path / "g.png", None)
    with pytest.raises(ConfigError, match="expected the columns 'problem' and 'answer'"):
        prepare.row({"images": [raw], "question": "?"}, tmp_path / "g.png", None)


def test_rows_of_nq_hotpotqa_train() -> None:
    prepare = script("search_r1")
    entry = {
        "id": "train_0",
        "question": "total number of death row inmates in the us",
        "golden_answers": ["2,718"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Answer the given question. ..."}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": ["2,718"]}, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
        "metadata": None,
    }
    row = prepare.row(entry)
    assert row["data_source"] == "searchR1_nq"
    assert row["prompt"][1] == {"role": "user", "content": "total number of death row inmates in the us?"}
    assert json.loads(row["reward_model"]["ground_truth"]) == {"target": ["2,718"]}
    assert row["extra_info"]["tool_selection"] == ["search"]
    with pytest.raises(ConfigError, match="expected the columns 'question' and 'golden_answers'"):
        prepare.row({"question": "?", "answers": ["x"]})


def test_search_r1_validates_a_fixed_part_of_each_set(tmp_path: Path) -> None:
    sizes = {"nq": 9, "popqa": 30, "bamboogle": 3}
    for split, times in (("train", 1), ("test", 2)):
        rows = [
            {"question": f"{name} {i}?", "golden_answers": ["x"], "data_source": name}
            for name, size in sizes.items()
            for i in range(size * times)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--source", str(tmp_path), "--validate", "7"]
    first, second = (prepared("search_r1", tmp_path / name, *words) for name in "ab")
    assert first == second
    chosen = Counter(row["data_source"] for row in first["test"])
    assert chosen == {"searchR1_nq": 7, "searchR1_popqa": 7, "searchR1_bamboogle": 6}
    assert len({row["extra_info"]["question"] for row in first["test"]}) == 20
    everything = pyarrow.parquet.read_table(tmp_path / "a" / "test_all.parquet")
    assert (len(first["train"]), everything.num_rows) == (42, 84)
    config = composed("search_r1", "whole_test", out=tmp_path / "a")
    assert config.data.val_files == str(tmp_path / "a" / "data" / "test_all.parquet")


SCHEMA_AND_QUESTION = "{db_details}:CREATE TABLE a (b TEXT);\n {external_knowledge}: ;\n {question}: How many?"
SKYRL: dict[str, Any] = {
    "data_source": "synsql",
    "prompt": [
        {"role": "system", "content": "... write a single <sql>your sql</sql> block ..."},
        {"role": "user", "content": SCHEMA_AND_QUESTION},
    ],
    "env_class": "text2sql",
    "db_id": "zoo",
    "data": "synsql",
    "reward_spec": {"method": "rule", "ground_truth": "SELECT COUNT(*) FROM a"},
    "extra_info": {"index": 0, "split": "train"},
}


def test_rows_of_skyrl_sql(tmp_path: Path) -> None:
    prepare = script("text2sql")
    row = prepare.row(SKYRL, tmp_path, "spider")
    path = "SynSQL-2.5M/databases/zoo/zoo.sqlite"
    assert row["data_source"] == "synsql"
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"] == prepare.SYSTEM
    assert row["prompt"][1] == SKYRL["prompt"][1]
    assert json.loads(row["reward_model"]["ground_truth"]) == {"sql": "SELECT COUNT(*) FROM a", "db_path": path}
    assert row["extra_info"]["tools_kwargs"] == {"sql": {"create_kwargs": {"db_path": path}}}
    with pytest.raises(ConfigError, match="the set 'wikisql' is unknown"):
        prepare.row({**SKYRL, "data": "wikisql"}, tmp_path, "spider")
    with pytest.raises(ConfigError, match="no gold query"):
        prepare.row({"db_id": "zoo", "question": "?"}, tmp_path, "spider")


def test_rows_of_spider_and_bird(tmp_path: Path) -> None:
    prepare = script("text2sql")
    for folder in ("spider/database", "bird/train/train_databases"):
        (tmp_path / folder / "zoo").mkdir(parents=True)
        with sqlite3.connect(tmp_path / folder / "zoo" / "zoo.sqlite") as connection:
            connection.execute("CREATE TABLE a (b TEXT)")
        connection.close()
    spider = {"db_id": "zoo", "question": "How many?", "query": "SELECT COUNT(*) FROM a", "question_toks": ["How"]}
    row = prepare.row(spider, tmp_path, "spider")
    assert row["data_source"] == "spider"
    assert row["prompt"][1]["content"] == "CREATE TABLE a (b TEXT)\nQuestion: How many?"
    bird = {"db_id": "zoo", "question": "How many?", "evidence": "count b", "SQL": "SELECT COUNT(b) FROM a"}
    row = prepare.row(bird, tmp_path, "bird")
    assert row["prompt"][1]["content"] == "CREATE TABLE a (b TEXT)\nQuestion: How many?\nGood to know: count b"
    assert json.loads(row["reward_model"]["ground_truth"]) == {
        "sql": "SELECT COUNT(b) FROM a",
        "db_path": "bird/train/train_databases/zoo/zoo.sqlite",
    }
    with pytest.raises(ConfigError, match="is no SQLite database"):
        prepare.row({**spider, "db_id": "gone"}, tmp_path, "spider")


def test_a_missing_database_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    (tmp_path / "rows.jsonl").write_text(json.dumps(SKYRL) + "\n" + json.dumps(SKYRL) + "\n")
    entry = {"class_name": "verl_multiturn.tools.sql.SqlTool", "config": {"root": str(tmp_path / "databases")}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    options = ["--out", tmp_path / "out", "--source", tmp_path / "rows.jsonl", "--tools", tmp_path / "tools.yaml"]
    command = [light_python(), str(RECIPES / "text2sql" / "prepare_data.py"), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 1
    assert "zoo.sqlite' is no file under" in done.stderr


def test_sources_of_the_mixture(tmp_path: Path) -> None:
    mixed = script("mixed")
    assert mixed.read_sources("gsm8k=/data/g.jsonl,sql=")["gsm8k"] == "/data/g.jsonl"
    assert mixed.read_sources("")["search"] == "PeterJinGo/nq_hotpotqa_train"
    with pytest.raises(ConfigError, match="expected KIND=SOURCE"):
        mixed.read_sources("chess=x")
    (tmp_path / "g.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(40))
    )
    sources = {"gsm8k": str(tmp_path / "g.jsonl"), "search": "", "sql": "", "gym": "gcd+lcm"}
    splits = mixed.real_rows(sources, None, 10)
    sets = [row["data_source"] for row in splits["train"]]
    assert sets == ["openai/gsm8k"] * 10 + ["reasoning_gym/gcd", "reasoning_gym/lcm"] * 5
    assert [row["data_source"] for row in splits["test"]] == ["openai/gsm8k", "reasoning_gym/gcd"]
    questions = [row["prompt"][1]["content"] for rows in splits.values() for row in rows]
    assert len(set(questions)) == len(questions)
    with pytest.raises(ConfigError, match="'chess' is no task of reasoning_gym"):
        mixed.real_rows({**sources, "gym": "chess"}, None, 10)


def test_no_made_question_is_in_both_splits() -> None:
    mixed = script("mixed")
    splits = mixed.gym_splits(mixed.SOURCES["gym"], {"train": 2000, "test": 200})
    asked = {split: {row["prompt"][-1]["content"] for row in rows} for split, rows in splits.items()}
    assert not asked["train"] & asked["test"]
    assert len(splits["test"]) == 200
    assert 1900 < len(splits["train"]) < 2000  # some were taken out


async def test_made_tasks_of_reasoning_gym_are_scored_by_their_verifiers() -> None:
    mixed = script("mixed")
    for row in mixed.gym_rows(mixed.SOURCES["gym"], 6, 3):
        answer = json.loads(row["reward_model"]["ground_truth"])["answer"]
        given = (row["data_source"], "", row["reward_model"]["ground_truth"])
        assert (await compute_score(*given, {"assistant_texts": [f"<answer>{answer}</answer>"]}))["score"] == 1.0
        assert (await compute_score(*given, {"assistant_texts": ["<answer>no idea</answer>"]}))["score"] == 0.0
    await aclose()


async def test_gsm8k_with_verls_old_user(tmp_path: Path) -> None:
    config = composed("gsm8k_multiturn", "interaction", smoke=True)
    path = config.actor_rollout_ref.rollout.multi_turn.interaction_config_path
    interactions = load_interactions(path)
    words = ["--smoke", "--interaction", config.recipe.prepare.interaction]
    for row in prepared("gsm8k_multiturn", tmp_path, *words)["test"]:
        user, kwargs = interaction_of_row(row, interactions, "a row")
        assert isinstance(user, AdaptedInteraction)
        await user.start("a", **kwargs)
        said = [{"role": "assistant", "content": text} for text in ("#### 0", row["extra_info"]["demonstration"][-1])]
        replies = [await user.reply("a", [turn], **kwargs) for turn in said]
        assert [(reply.reward, reply.done) for reply in replies] == [(0.0, False), (1.0, True)]
        await user.close("a")
