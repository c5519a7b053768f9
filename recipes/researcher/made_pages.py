"""The made world of `--smoke`: 200 pages about works, their founders and towns, and questions about them.

A question takes two pages: that of the works, whose second part has the founder and the year, and the founder's.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.runs.data import tool_call

PAGES = 200
PART_CHARACTERS = 160
_PEOPLE = ("Ada Brook", "Ben Frost", "Cora Hill", "Dan Lake", "Eva Moss", "Finn Reed", "Gus Stone", "Ida Vale")
_TEST_PEOPLE = ("Jan Wood", "Kim Birch", "Lou Clay", "Mia Dawn")
_WORKS = ("Velm", "Orsk", "Tarn", "Pell", "Quin", "Rusk", "Senn", "Ulm", "Wick", "Yarm", "Zell", "Bree")
_GOODS = ("clocks", "lamps", "boats", "bells", "maps", "ropes", "saws", "pens")


@dataclass(frozen=True)
class Task:
    """A question: how old the founder was when the works were founded."""

    works: str
    person: str
    founded: int
    born: int
    is_test: bool

    @property
    def question(self) -> str:
        """Return the question."""
        return f"How old was the founder of {self.works} in the year when it was founded?"

    @property
    def age(self) -> int:
        """Return the right answer."""
        return self.founded - self.born

    def pages(self, rng: random.Random) -> list[dict[str, str]]:
        """Return the two pages: the works' has two parts, the founder's has one."""
        first, second, third = rng.sample(_GOODS, 3)
        opening = f"{self.works} made {first} and {second} for many towns. Its {third} were sold in every shop. "
        works = opening.ljust(PART_CHARACTERS - 8, ".") + f" It was founded in {self.founded} by {self.person}."
        person = f"{self.person} was born in {self.born}. {self.person} made {third} before anyone else did."
        return [{"title": self.works, "text": works}, {"title": self.person, "text": person}]

    def ways(self) -> dict[str, list[str]]:
        """Return worked conversations as the assistant's turns, without summaries.

        `good` is right. `guess` gives a wrong age after its search. `invalid` gives the right one, after a call that
        does not fit the tool's schema.
        """
        search = f"<think>Which page?</think>\n{tool_call('search', {'query': self.works})}"
        answer = f"<answer>{self.age}</answer>"
        return {
            "good": [
                search,
                tool_call("browse", {"page": self.works}),
                tool_call("browse", {"page": self.works, "part": 2}),
                tool_call("browse", {"page": self.person}),
                tool_call("python", {"code": f"print({self.founded} - {self.born})"}),
                answer,
            ],
            "guess": [search, f"<answer>{self.age + 1}</answer>"],
            "invalid": [search, tool_call("browse", {"title": self.works}), answer],
        }

    def summary(self, said: int) -> str:
        """Return the summary of a good conversation after so many turns: the texts of its pages."""
        if said < 3:
            return f"The page is {self.works}."
        known = f"{self.works}: {self.founded}, {self.person}."
        return known if said < 4 else f"{known} Born in {self.born}."


def tasks() -> list[Task]:
    """Return the questions. The last ones are for the test split."""
    rng = random.Random(0)
    made = []
    for works, person in zip(_WORKS, (*_PEOPLE, *_TEST_PEOPLE), strict=True):
        born = rng.randint(1800, 1899)
        made.append(Task(f"{works} Works", person, born + rng.randint(20, 49), born, person in _TEST_PEOPLE))
    return made


def write_pages(folder: Path) -> dict[str, Any]:
    """Write the pages, most of them about towns, into `corpus` in a folder; return the tools that read them."""
    rng = random.Random(0)
    pages = [page for task in tasks() for page in task.pages(rng)]
    for number in range(PAGES - len(pages)):
        first, second = rng.sample(_GOODS, 2)
        pages.append({"title": f"Town {number}", "text": f"Town {number} has shops for {first} and {second}."})
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": str(number), **page}) + "\n" for number, page in enumerate(pages)]
    (folder / "corpus" / "pages.jsonl").write_text("".join(lines), encoding="utf-8")
    place = {"corpus": str((folder / "corpus").resolve()), "index_dir": str((folder / "index").resolve())}
    search = {**place, "top_k": 1, "snippet_characters": 40}
    return {
        "tools": [
            {"class_name": "verl_multiturn.tools.search.SearchTool", "config": search},
            {
                "class_name": "verl_multiturn.tools.browse.BrowseTool",
                "config": {**place, "part_characters": PART_CHARACTERS},
            },
            {"class_name": "verl_multiturn.tools.python.PythonTool", "config": {"timeout_s": 10, "memory_mb": 256}},
        ]
    }
