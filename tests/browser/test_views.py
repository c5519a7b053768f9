"""Every view of the page, served and exported, by mouse and by keyboard."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from tests.browser.conftest import Watched
from tests.support.evaluation_samples import LATER, OTHER, write_evaluation
from tests.support.sample_records import sample_record, sample_run
from tests.support.view_samples import HOSTILE, LONG, START
from verl_multiturn.describe import printable
from verl_multiturn.observe.documents.documents import Documents
from verl_multiturn.observe.view.export import export
from verl_multiturn.records.json_text import line_of
from verl_multiturn.records.rows import columns

FILTERS = [
    "", "score<1", "score>=0.5", "fate=trained trained_step>=2", "fate=open,cut", "fate!=trained", "validation=true",
    "number!=0 score=0", "score=none", "sib", "SIB-1", "stop_reason=finished", "data_source~SUM", 'why="cut"',
    "untrained=too_old", "seconds>2.5 calls=1", "group_std=0.5", "score=nan", "index=7",
]  # fmt: skip
PAINTED = """element => {
  const bases = new Map();
  let length = 0;
  for (const node of element.childNodes) { bases.set(node, length); length += node.length; }
  const found = [];
  for (const [name, highlight] of CSS.highlights)
    for (const range of highlight)
      if (name !== "selected" && bases.has(range.startContainer)) {
        const base = bases.get(range.startContainer);
        found.push([name, base + range.startOffset, base + range.endOffset]);
      }
  return [element.textContent, found];
}"""


@pytest.fixture(params=["exported", "served"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_an_export_asks_for_nothing_and_complains_of_nothing(
    watched: Watched, exported: str, documents: Documents
) -> None:
    watched.page.goto(exported)
    watched.page.locator("#about", has_text=f"{len(documents.table.whole)} conversations").wait_for()
    assert watched.requests == [exported]


def test_every_view_opens(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#run")
    page.locator(".chart canvas").first.wait_for()
    page.locator("h3", has_text="what became of 62 conversations").wait_for()
    page.click("nav >> text=conversations")
    page.locator("#total", has_text="62 conversations").wait_for()
    page.click("nav >> text=open")
    page.locator("td", has_text="call </script>").wait_for()
    page.click("nav >> text=steps")
    page.locator("#late").wait_for()
    page.locator(".gantt canvas").wait_for()
    page.goto(f"{address}#group?uid=sib&dir=0")
    page.locator(".sibling").nth(3).wait_for()
    page.goto(f"{address}#talk?id=s-0&tab=tree")
    page.locator("summary", has_text="completion 2").wait_for()
    assert page.locator("summary", has_text="completion").count() == 3
    assert page.locator(".badge", has_text="undelivered").count() == 1
    page.goto(f"{address}#talk?id=nobody")
    page.locator("[role=alert]").wait_for()
    watched.complaints = [each for each in watched.complaints if "404" not in each]  # the browser's own word for it


def test_the_table_by_mouse(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#table")
    page.click("th button:has-text('score')")
    page.locator("th[aria-sort=ascending]", has_text="score").wait_for()
    page.click("th button:has-text('score')")
    page.locator("th[aria-sort=descending]", has_text="score").wait_for()
    page.click("button:has-text('next')")
    page.locator("text=51–62").wait_for()
    assert "offset=50" in page.url
    assert "sort=score" in page.url
    page.go_back()
    page.locator("text=1–50").wait_for()
    page.locator("tbody tr").first.click()
    page.locator(".talk").wait_for()
    page.click("[role=tab]:has-text('tokens')")
    page.locator(".tokens").click(position={"x": 60, "y": 20})
    page.locator(".token-facts", has_text="logprob").or_(page.locator(".token-facts", has_text="source")).wait_for()
    page.click("text=siblings")
    page.locator("#total", has_text="4 conversations").wait_for()


def test_all_by_keyboard(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#run")
    page.locator(".chart").first.wait_for()
    page.keyboard.press("/")
    page.locator("#filter:focus").wait_for()
    page.keyboard.type("uid=sib")
    page.keyboard.press("Enter")
    page.locator("#total", has_text="4 conversations").wait_for()
    rows = page.locator("tbody tr")
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("h2", has_text="sib-1").wait_for()
    page.keyboard.press("2")
    page.locator(".tokens").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.locator(".token-facts", has_text="token 5").wait_for()
    assert "token=5" in page.url
    page.locator(".talk h2").click()
    page.keyboard.press("s")
    page.locator(".gantt canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator(".talk").wait_for()
    page.keyboard.press("o")
    page.locator("h2", has_text="what runs now").wait_for()
    page.keyboard.press("?")
    page.locator(".keys").wait_for()


def test_counts_are_those_of_python(watched: Watched, exported: str, documents: Documents) -> None:
    page = watched.page
    page.goto(f"{exported}#table")
    for where in FILTERS:
        expected = documents.page(where, "began", False, 0, 1)["total"]
        page.fill("#filter", where)
        page.press("#filter", "Enter")
        page.locator("#total", has_text=re.compile(f"^{expected} conversations$")).wait_for()
        assert page.locator("tbody tr").count() == min(50, expected)


def test_the_exported_order_is_the_servers(watched: Watched, exported: str, documents: Documents) -> None:
    page = watched.page
    for sort, desc in itertools.product(["score", "seconds", "request_id", "fate", "trained_step"], (0, 1)):
        rows = documents.page("", sort, bool(desc), 0, 50)["rows"]
        page.goto("about:blank")
        page.goto(f"{exported}#table?{_query(sort=sort, desc=desc, columns='request_id')}")
        page.locator("tbody code").first.wait_for()
        shown = page.locator("tbody code").evaluate_all("all => all.map((each) => each.title)")
        assert shown == [row["request_id"] for row in rows]


def test_a_wrong_filter_is_said(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#table?where=nonsense%3D1")
    page.locator("[role=alert]", has_text="the filter names the column").wait_for()
    watched.complaints = [each for each in watched.complaints if "400" not in each]


def _query(**entries: Any) -> str:
    return urlencode(entries)


SEQUENCES = {"logprob": [0.05, 0.2, 0.5, 1, 2, 3.5, 5, 8], "entropy": [0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 3]}


def expected_names(documents: Documents, request_id: str, colour: str) -> list[str]:
    """Return the colour of each token, from the record."""
    found = documents.record(request_id)
    assert found is not None
    row, joined = columns(found["record"]["rows"][0]), (found["joined"] or [None])[0]
    names, place = [], -1
    for at, source in enumerate(row["sources"]):
        place += source == 1
        if colour == "source":
            names.append(f"source{source}")
        elif source != 1:
            names.append("")
        elif colour in SEQUENCES:
            value = -row["logprobs"][at] if colour == "logprob" else float(joined["entropy"][place])
            names.append("" if np.isnan(value) else f"seq{sum(value >= limit for limit in SEQUENCES[colour])}")
        elif colour == "age":
            names.append(f"seq{max(0, min(8, joined['step'] - 1 - row['versions'][at]))}")
        elif colour == "trained":
            names.append(f"cat{int(place not in joined['untrained_tokens'])}")
        else:
            scale = {"advantage": 2, "drift": 0.5}[colour]
            value = float(joined["advantages" if colour == "advantage" else "old_log_probs"][place])
            value -= row["logprobs"][at] if colour == "drift" else 0
            level = int(np.sign(value) * np.ceil(4 * abs(value) / scale - 1e-9)) if not np.isnan(value) else None
            names.append("" if level is None else f"div{max(-4, min(4, level))}")
    return names


def test_colours_are_the_records_token_by_token(watched: Watched, exported: str, documents: Documents) -> None:
    page = watched.page
    colours = ["source", "logprob", "drift", "entropy", "advantage", "age", "trained"]
    for request_id, colour in itertools.product(("sib-0", "sib-3"), colours):
        page.goto("about:blank")
        page.goto(f"{exported}#talk?id={request_id}&tab=row0&colour={colour}")
        page.locator(".tokens").wait_for()
        text, ranges = page.locator(".tokens").evaluate(PAINTED)
        found = documents.record(request_id)
        assert found is not None
        pieces = [found["pieces"][str(each)] for each in found["record"]["rows"][0]["ids"]]
        assert text == "".join(pieces)
        ends = list(itertools.accumulate(len(piece) for piece in pieces))
        starts = [0, *ends[:-1]]
        shown = [
            "".join(name for name, first, last in ranges if first <= start and end <= last)
            for start, end in zip(starts, ends, strict=True)
        ]
        assert shown == expected_names(documents, request_id, colour)


def test_64_000_tokens_need_no_elements(watched: Watched, exported: str, documents: Documents) -> None:
    page = watched.page
    page.goto(f"{exported}#talk?id=long&tab=row0&colour=source")
    page.locator(".tokens").wait_for()
    text, ranges = page.locator(".tokens").evaluate(PAINTED)
    found = documents.record("long")
    assert found is not None
    assert len(found["record"]["rows"][0]["ids"]) == LONG + 3
    assert page.locator(".tokens *").count() == 0
    assert sum(end - start for _, start, end in ranges) == len(text.encode("utf-16-le")) // 2  # as JavaScript counts


def test_hostile_texts_run_nothing(watched: Watched, address: str) -> None:
    page = watched.page
    for tab in ("messages", "row0", "tree", "reward", "time", "raw"):
        page.goto(f"{address}#talk?id=hostile&tab={tab}")
        page.locator("[role=tab][aria-selected=true]").wait_for()
        page.locator(".problem", has_text="onerror").first.wait_for()
        assert page.evaluate("window.pwned") is None
        assert page.locator("img").count() == 0
        if tab == "messages":
            assert "␀⟨U+202E⟩evil\ufffd{{constructor}}" in page.locator(".message").first.inner_text()


def test_hostile_names_of_groups_and_runs(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#group?{_query(uid=HOSTILE.replace(chr(0xD83D), chr(0xFFFD)), dir=0)}")
    page.locator(".sibling").wait_for()
    page.goto(f"{address}#run")
    page.locator("summary", has_text="settings").first.click()
    page.locator("pre", has_text="window.pwned").wait_for()
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0


def test_no_script_of_a_text_would_be_allowed(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(f"{address}#run")
    page.locator(".chart").first.wait_for()
    page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "window.pwned = 1";
      document.body.append(script);
    }""")
    assert page.evaluate("window.pwned") is None
    assert any("Content Security Policy" in each for each in watched.complaints)
    watched.complaints = []


def test_a_part_is_exported(watched: Watched, documents: Documents, tmp_path: Path) -> None:
    told = export(documents, tmp_path / "part.html", "uid=sib")
    assert told["conversations"] == 4
    watched.page.goto((tmp_path / "part.html").as_uri() + "#table")
    watched.page.locator("#total", has_text="4 conversations").wait_for()
    watched.page.goto((tmp_path / "part.html").as_uri() + "#step?step=4")
    watched.page.locator("text=4 conversations that were trained in it").wait_for()


def test_what_is_written_appears(watched: Watched, folder: Path, served: str) -> None:
    page = watched.page
    page.goto(f"{served}#table?where=late")
    page.locator("#total", has_text="0 conversations").wait_for()
    line = {"event": "begin", "request_id": "late", "uid": "late", "number": 0, "step": 3, "at": 1.0}
    path = folder / f"{START}-other-1-aaaaaaaa.lines.jsonl"
    path.write_text(json.dumps(line) + "\n")
    page.locator("#total", has_text="1 conversations").wait_for()


def test_two_runs_side_by_side(watched: Watched, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for path in folder.glob(f"run-{START}.json"):
        shutil.copy(path, tmp_path / "other")
    shutil.copy(folder / "steps.jsonl", tmp_path / "other")
    both = Documents([folder, tmp_path / "other"])
    both.refresh()
    export(both, tmp_path / "both.html")
    watched.page.goto((tmp_path / "both.html").as_uri() + "#run")
    watched.page.locator("h2", has_text="other").wait_for()
    watched.page.locator("summary", has_text="settings that differ").wait_for()
    assert f"in {folder.parent.name}/records" in watched.page.locator(".finding header").first.inner_text()


def test_nothing_of_a_validation_was_trained(watched: Watched, exported: str, documents: Documents) -> None:
    page = watched.page
    found = documents.record(f"{START}-v3-0-0")
    assert found is not None
    token = columns(found["record"]["rows"][0])["sources"].index(1)
    page.goto(f"{exported}#talk?id={START}-v3-0-0&tab=row0&colour=trained&token={token}")
    page.locator(".token-facts", has_text="in the loss no (validation)").wait_for()
    _, ranges = page.locator(".tokens").evaluate(PAINTED)
    assert {name for name, _, _ in ranges} == {"cat0"}
    page.goto(f"{exported}#talk?id={START}-v3-0-0&tab=row0&colour=age")
    page.locator(".legend", has_text="step s begins").wait_for()
    assert page.locator(".tokens").evaluate(PAINTED)[1] == []
    page.goto(f"{exported}#talk?id=sib-0&tab=row0&token=4")
    page.locator(".token-facts", has_text="in the loss yes").wait_for()
    page.goto(f"{exported}#talk?id=sib-0&tab=row0&token=5")
    page.locator(".token-facts", has_text="in the loss no (too_old)").wait_for()
    page.goto(f"{exported}#talk?id=long&tab=row0&token=3")
    page.locator(".token-facts", has_text="in the loss unknown (no join)").wait_for()


def test_steps_open_with_the_first_that_is_there(watched: Watched, documents: Documents, tmp_path: Path) -> None:
    export(documents, tmp_path / "part.html", "uid=sib")
    page = watched.page
    page.goto((tmp_path / "part.html").as_uri() + "#run")
    page.click("nav >> text=steps")
    page.locator("h2", has_text="step 4").wait_for()
    assert page.url.endswith("#step?dir=0&step=4")


def test_a_curve_leads_to_its_own_run(watched: Watched, tmp_path: Path) -> None:
    folders = [tmp_path / "low", tmp_path / "high"]
    for number, folder in enumerate(folders):
        sample_run(folder, start=START)
        line = {"event": "step", "start": START, "began": 1.0, "ended": 2.0, "phases": {}, "join": None, "rows": 0}
        with (folder / "steps.jsonl").open("a") as file:
            for step in (1, 2):
                file.write(json.dumps({**line, "step": step, "metrics": {"m": float(number)}}) + "\n")
    both = Documents(folders)
    both.refresh()
    export(both, tmp_path / "both.html")
    page = watched.page
    for height, number in ((0.1, 1), (0.9, 0)):
        page.goto("about:blank")
        page.goto((tmp_path / "both.html").as_uri() + "#run?metrics=m")
        chart = page.locator(".chart", has=page.locator("figcaption", has_text=re.compile("^m$"))).locator(".u-over")
        chart.wait_for()
        box = chart.bounding_box()
        chart.click(position={"x": 0.9 * box["width"], "y": height * box["height"]})
        page.locator("h2", has_text="step 2").wait_for()
        assert page.url.endswith(f"#step?dir={number}&step=2")


def test_a_group_whose_uid_has_quotes(watched: Watched, tmp_path: Path) -> None:
    record = sample_record(request_id="q", uid='a "b" c')
    (tmp_path / "records.jsonl").write_bytes(line_of(record))
    documents = Documents([tmp_path])
    documents.refresh()
    export(documents, tmp_path / "page.html")
    page = watched.page
    page.goto((tmp_path / "page.html").as_uri() + "#talk?id=q")
    page.click("text=siblings")
    page.locator("#total", has_text="1 conversations").wait_for()
    page.go_back()
    page.locator(".facts a", has_text='a "b" c').click()
    page.locator(".sibling").wait_for()


def test_a_group_without_signal_says_so_as_the_metrics_do(watched: Watched, tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", {0: [0.30000001192092896, 0.3], 1: [0.3, 0.3001], 2: [0.9, "invalid"]})
    documents = Documents([folder])
    documents.refresh()
    export(documents, tmp_path / "page.html")
    page = watched.page
    shown = []
    for uid in "012":
        page.goto("about:blank")  # so that no sibling of the group before remains on the page
        page.goto((tmp_path / "page.html").as_uri() + f"#group?uid={uid}&dir=0")
        page.locator("h2", has_text=f"group {uid}").wait_for()
        page.locator(".sibling").first.wait_for()
        shown.append(page.locator(".badge", has_text="all scores are equal").count())
    assert shown == [1, 0, 0]


def test_rows_that_flipped_between_two_evaluations_stand_side_by_side(watched: Watched, tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "first", {0: [0.0, 0.0], 1: [1.0, 1.0]})
    second = write_evaluation(tmp_path / "second", {0: [1.0, 1.0], 1: [1.0, 1.0]}, model=OTHER, start=LATER)
    documents = Documents([first, second])
    documents.refresh()
    export(documents, tmp_path / "page.html")
    page = watched.page
    page.goto((tmp_path / "page.html").as_uri() + "#run")
    page.locator("td", has_text="0 of 2 in first/records, 2 of 2 in second/records").wait_for()
    page.click("text=side by side")
    page.locator("h3", has_text="second/records").wait_for()
    sides = page.locator("section > .columns > div")
    assert [sides.nth(at).locator(".sibling").count() for at in range(sides.count())] == [2, 2]
    assert len({sides.nth(at).bounding_box()["y"] for at in range(2)}) == 1


def test_what_is_hidden_is_the_same_on_the_page_and_on_a_terminal(watched: Watched, served: str) -> None:
    kinds = map(unicodedata.category, map(chr, range(0x110000)))
    # A browser knows more letters than Python. Those for private use, half of all, are alike.
    known = [code for code, kind in enumerate(kinds) if kind != "Cn" and (kind != "Co" or code % 256 in (0, 255))]
    watched.page.goto(served)
    shown = watched.page.evaluate(
        """async codes => {
          const { visible } = await import(new URL("static/lib.js", location.href.split("#")[0]).href);
          return codes.filter(code => visible(String.fromCodePoint(code)) !== String.fromCodePoint(code));
        }""",
        known,
    )
    assert shown == [code for code in known if printable(chr(code)) != chr(code)]
