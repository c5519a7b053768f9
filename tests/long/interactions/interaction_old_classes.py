"""verl's own old interactions through our runtime: do they answer, score and end as in the verl that they are from?

    python -m benchmarks.interaction_old_classes [--wheel verl-0.6.1-py3-none-any.whl]

The wheel of verl 0.6.1 is downloaded into a temporary folder, unless it is given. The same conversations are played

- by that verl in a process of its own: its classes are called directly, as its loop did;
- by its two files as they are, which import our `verl.interactions.base`, from a YAML through `InteractionSession`;
- by our classes of the same names, from verl's YAML through `InteractionSession`.

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
VERSION = "0.6.1"
CLASSES = {
    "gsm8k": "gsm8k_interaction.Gsm8kInteraction",
    "weather": "weather_interaction.WeatherInteraction",
}
_COPIES = "verl_as_it_was"
# Texts of models around a number: the form that verl reads, and those that it does not.
FORMS = [
    "#### {}", "So the answer is\n#### {}", "#### {}.", "#### {} dollars", "#### ${}", "####{}", "### {}", "{}",
    "The answer is {}", "\\boxed{{{}}}", "#### {}\n#### {}", "#### 0\n#### {}", "#### {}\n#### 0",
    "#### {}\n" + "x" * 280, "#### {}\n" + "x" * 300, "y" * 400 + "#### {}", "#### **{}**",
    "####  {}", "#### {}%", "#### \u2212{}", "#### +{}",
    "\u0434\u0430 #### {} \u2713", "<think>#### 1</think>#### {}", "#### {},", "#### {}.0", "#### {} or so",
]  # fmt: skip
FIXED = [
    "",
    " ",
    "####",
    "#### ",
    "#### ,",
    "#### .",
    "#### -",
    "I do not know.",
    "#### forty-two",
    "#### 1e3",
    "\u0000#### 4",
]


@dataclass(frozen=True)
class Talk:
    """A conversation: the interaction, the row's kwargs, and the text before each answer of the interaction."""

    interaction: str
    kwargs: dict[str, Any]
    turns: list[list[dict[str, Any]]]


def talks(count: int, seed: int) -> list[Talk]:
    """Make conversations, half of them with right answers sooner or later.

    Args:
        count: Their number.
        seed: Seed of the draws.
    """
    draw = random.Random(seed)
    return [_weather(draw) if index % 4 == 3 else _gsm8k(draw) for index in range(count)]


def _gsm8k(draw: random.Random) -> Talk:
    truth = draw.choice([str(draw.randint(-99, 99)), str(draw.randint(1000, 9_999_999)), f"{draw.random() * 100:.2f}"])
    turns = []
    for _ in range(draw.randint(1, 5)):
        number = truth if draw.random() < 0.5 else str(draw.randint(-99, 99))
        if draw.random() < 0.2 and number.lstrip("-").isdigit():
            number = f"{int(number):,}"
        form = draw.choice(FORMS)
        answer = draw.choice(FIXED) if draw.random() < 0.15 else form.format(*[number] * form.count("{}"))
        turns.append([{"role": "assistant", "content": answer}])
    return Talk("gsm8k", {"ground_truth": truth}, turns)


def _weather(draw: random.Random) -> Talk:
    before: list[dict[str, Any]] = [{"role": "assistant", "content": "I will look."}]
    if draw.random() < 0.6:
        before.append({"role": "tool", "content": draw.choice(["sunny", "", "no tool call", '{"temperature": 12}'])})
        before.append({"role": "assistant", "content": "It is sunny."})
    return Talk("weather", {}, [before, [{"role": "assistant", "content": "And now?"}]])


Answers = list[tuple[str, float, bool]]
"""The text, score and end of each answer of a conversation."""


async def call_directly(interactions: dict[str, Any], given: list[Talk]) -> list[Answers]:
    """Play conversations with objects of old classes, as the old verl's loop called them.

    Args:
        interactions: The objects by name.
        given: The conversations.
    """
    played = []
    for number, talk in enumerate(given):
        old, kwargs = interactions[talk.interaction], {"name": talk.interaction, **talk.kwargs}
        await old.start_interaction(f"c{number}", **kwargs)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "A question. #### 7"}]
        answers: Answers = []
        for turn in talk.turns:
            messages += turn
            ends, text, score, _ = await old.generate_response(f"c{number}", messages, **kwargs)
            messages.append({"role": "user", "content": text})
            answers.append((text, float(score), bool(ends)))
            if ends:
                break
        await old.finalize_interaction(f"c{number}")
        played.append(answers)
    return played


async def call_through_sessions(path: Path, given: list[Talk]) -> list[Answers]:
    """Play conversations with the interactions of a YAML file, as our runtime calls them, 64 at once.

    Args:
        path: The file.
        given: The conversations.
    """
    from verl_multiturn.interactions.running.registry import interaction_of_row, load_interactions
    from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession

    interactions = load_interactions(path)
    gates = {name: InteractionGate(interaction, 60.0) for name, interaction in interactions.items()}
    at_once = asyncio.Semaphore(64)

    async def play(number: int, talk: Talk) -> Answers:
        row = {"extra_info": {"interaction_kwargs": {"name": talk.interaction, **talk.kwargs}}}
        _, kwargs = interaction_of_row(row, interactions, f"conversation {number}")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "A question. #### 7"}]
        answers: Answers = []
        async with at_once, InteractionSession(gates[talk.interaction], f"c{number}", kwargs) as session:
            await session.start()
            for turn in talk.turns:
                messages += turn
                reply = await session.reply(messages)
                messages.append({"role": "user", "content": reply.text})
                answers.append((reply.text, -1.0 if reply.reward is None else reply.reward, reply.done))
                if reply.done:
                    break
            if await session.score() != answers[-1][1]:
                answers.append(("another score at the end", -1.0, True))
        return answers

    played = await asyncio.gather(*(play(number, talk) for number, talk in enumerate(given)))
    left = [name for name, interaction in interactions.items() if interaction.old._instance_dict]
    if left:
        raise SystemExit(f"conversations left in {left}")
    return list(played)


def write_yaml(path: Path, package: str) -> Path:
    """Write an interaction YAML as for verl 0.6.

    Args:
        path: The file.
        package: The package of the classes.
    """
    entries = [{"name": name, "class_name": f"{package}.{of}", "config": {}} for name, of in CLASSES.items()]
    path.write_text(yaml.safe_dump({"interaction": entries}))
    return path


def unpacked(wheel: Path | None, folder: Path) -> Path:
    """Unpack verl's old wheel, and return the folder.

    Args:
        wheel: The wheel; None to download it.
        folder: Where it is downloaded and unpacked.
    """
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, f"verl=={VERSION}"]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("verl-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    shutil.rmtree(folder / "wheel" / "tests", ignore_errors=True)  # verl's own, which would hide ours
    return folder / "wheel"


@contextmanager
def files_as_they_are(wheel: Path, folder: Path) -> Iterator[str]:
    """Let the two files of the wheel be imported as a package whose `base` is our `verl.interactions.base`.

    Args:
        wheel: The unpacked wheel.
        folder: Where the package is made.
    """
    from verl_multiturn.interactions.old_verl import classes as verl_classes

    package = folder / _COPIES
    package.mkdir()
    for of in CLASSES.values():
        name = f"{of.partition('.')[0]}.py"
        (package / name).write_bytes((wheel / "verl" / "interactions" / name).read_bytes())
    sys.path.insert(0, str(folder))
    base = importlib.import_module("verl.interactions.base")
    if base.BaseInteraction is not verl_classes.BaseInteraction:
        raise SystemExit("the installed verl has interactions of its own")
    sys.modules[f"{_COPIES}.base"] = base
    try:
        yield _COPIES
    finally:
        sys.path.remove(str(folder))


def of_old_verl(wheel: Path, count: int, seed: int) -> list[Answers]:
    """Return the answers of the old verl, from a process of its own.

    Args:
        wheel: The unpacked wheel.
        count: As in `talks`.
        seed: As in `talks`.
    """
    environment = {**os.environ, "PYTHONPATH": f"{wheel}{os.pathsep}{ROOT}", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-m", "tests.long.interactions.interaction_old_classes", str(count), str(seed)]
    done = subprocess.run(command, env=environment, cwd=wheel, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"verl {VERSION}: {done.stderr[-2000:]}")
    return [[tuple(answer) for answer in answers] for answers in json.loads(done.stdout.splitlines()[-1])]


def directly(count: int, seed: int) -> None:
    """Print the answers of the verl of this process, as one line of JSON."""
    made = {}
    for name, of in CLASSES.items():
        module, _, class_name = of.partition(".")
        found = getattr(importlib.import_module(f"verl.interactions.{module}"), class_name)
        if not found.__module__.startswith("verl.interactions."):
            raise SystemExit(f"{found} is not verl's own")
        made[name] = found(config={"name": name})
    print(json.dumps(asyncio.run(call_directly(made, talks(count, seed)))))


def differences(given: list[Talk], old: list[Answers], new: list[Answers]) -> int:
    """Print conversations that went otherwise, and return their number.

    Args:
        given: The conversations.
        old: The answers of the old verl.
        new: Ours.
    """
    wrong = [index for index in range(len(given)) if old[index] != new[index]]
    for index in wrong[:5]:
        print(f"{given[index]}\n  was {old[index]}\n  is  {new[index]}")
    return len(wrong)


def measure(wheel: Path | None = None, count: int = 400, seed: int = 0) -> dict[str, Any]:
    """Play the conversations in all three ways, and return the figures.

    Args:
        wheel: verl's old wheel; None to download it.
        count: Number of conversations.
        seed: Seed of the conversations.
    """
    given = talks(count, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unzipped = unpacked(wheel, folder)
        old = of_old_verl(unzipped, count, seed)
        with files_as_they_are(unzipped, folder) as package:
            copies = asyncio.run(call_through_sessions(write_yaml(folder / "theirs.yaml", package), given))
        ours = asyncio.run(call_through_sessions(write_yaml(folder / "ours.yaml", "verl.interactions"), given))
    answers = [answer for each in old for answer in each]
    return {
        "old_classes": len(CLASSES),
        "old_same": not differences(given, old, copies),
        "ours_same": not differences(given, old, ours),
        "conversations": count,
        "turns": len(answers),
        "right": sum(score == 1.0 for _, score, _ in answers),
        "ended": sum(ends for _, _, ends in answers),
        "seed": seed,
    }


if __name__ == "__main__":
    directly(*map(int, sys.argv[1:]))
