"""Interactions as they were written for verl 0.4 to 0.6, and the modules from which they import."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until
from verl_multiturn.errors import ConfigError, InteractionContractError
from verl_multiturn.interactions.base import Interaction
from verl_multiturn.interactions.old_verl.classes import (
    AdaptedInteraction,
    BaseInteraction,
    Gsm8kInteraction,
    WeatherInteraction,
    adapted,
    is_old_class,
)
from verl_multiturn.interactions.old_verl.registry import get_interaction_class, initialize_interactions_from_config
from verl_multiturn.interactions.running.registry import build_interaction, interaction_of_row, load_interactions
from verl_multiturn.interactions.running.replies import InteractionFailedError
from verl_multiturn.interactions.running.session import InteractionGate, InteractionSession

pytestmark = pytest.mark.stack  # importing `verl.interactions` imports verl, too


class Count(BaseInteraction):
    """A user who counts; it records its calls."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.calls: list[tuple[Any, ...]] = []

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.calls.append(("start", instance_id, kwargs))
        return "an id of its own"

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.calls.append(("generate", instance_id, messages, kwargs))
        return len(messages) > 2, f"{len(messages)} messages", 0.25, {"said": "much", "length": 3, "right": True}


async def test_the_old_methods_get_what_the_old_loops_gave() -> None:
    old = Count({"name": "count"})
    interaction = adapted(old)
    assert isinstance(interaction, Interaction)
    assert interaction.name == "count"
    assert await interaction.start("c1", level=2) is None
    first = await interaction.reply("c1", [{"role": "user", "content": "Hello"}], level=2)
    assert (first.text, first.done, first.reward) == ("1 messages", False, 0.25)
    assert first.metrics == {"said": "much", "length": 3, "right": True}
    assert (await interaction.reply("c1", [{"role": "user", "content": ""}] * 3)).done
    kwargs = {"name": "count", "level": 2}
    assert old.calls[:2] == [
        ("start", "c1", kwargs),
        ("generate", "c1", [{"role": "user", "content": "Hello"}], kwargs),
    ]
    assert await interaction.score("c1") == 0.0
    await interaction.close("c1")
    await interaction.aclose()


async def test_any_name_may_be_among_the_kwargs_of_a_row() -> None:
    old = Count({"name": "count"})
    await adapted(old).start("c1", method="m")
    await adapted(old).reply("c1", [], method="m")
    assert [call[-1] for call in old.calls] == [{"name": "count", "method": "m"}] * 2


async def test_a_score_that_is_not_async_has_a_thread_of_its_own() -> None:
    class Hanging(BaseInteraction):
        async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
            return str(instance_id)

        def calculate_score(self, instance_id: str) -> float:  # type: ignore[override]
            goes_on.wait()
            return 1.0

    async def play(name: str) -> None:
        async with InteractionSession(gate, name, {}) as session:
            await session.start()
            with pytest.raises(InteractionFailedError, match="score did not return within"):
                await session.score()
            assert session._calls._given_up  # given up, and not forgotten: `close` waits for it
            given_up.append(name)

    goes_on, given_up = threading.Event(), []
    gate = InteractionGate(adapted(Hanging({"name": "hanging"})), 0.2)
    playing = [asyncio.ensure_future(play(f"c{index}")) for index in range(40)]
    try:
        await until(lambda: len(given_up) == 40)
        # The threads that others use are free.
        assert await asyncio.to_thread(lambda: 7) == 7
    finally:
        goes_on.set()
    await asyncio.gather(*playing)


async def test_a_signature_without_a_name_gets_none() -> None:
    class Strict(BaseInteraction):
        async def start_interaction(self, instance_id: str | None = None, level: int = 0) -> str:  # type: ignore[override]
            assert level == 2
            return str(instance_id)

    await adapted(Strict({"name": "strict"})).start("c1", level=2)


async def test_score_and_end_are_called_with_an_id_or_without() -> None:
    called: list[Any] = []

    class Without(BaseInteraction):
        async def calculate_score(self) -> float:  # type: ignore[override]
            called.append("score")
            return 0.5

        async def finalize_interaction(self) -> None:  # type: ignore[override]
            called.append("end")

    class With(BaseInteraction):
        async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:  # type: ignore[override]
            called.append(("score", instance_id))
            return 0.75

        def finalize_interaction(self, instance_id: str) -> None:  # type: ignore[override]
            called.append(("end", instance_id, threading.current_thread() is threading.main_thread()))

    class Silent(BaseInteraction):
        async def calculate_score(self, instance_id: str) -> None:  # type: ignore[override]
            """Return nothing, as a class may whose score is not requested."""

    assert await adapted(Without({})).score("c1") == 0.5
    await adapted(Without({})).close("c1")
    assert await adapted(With({})).score("c1") == 0.75
    await adapted(With({})).close("c1")
    assert called == ["score", "end", ("score", "c1"), ("end", "c1", False)]
    assert await adapted(Silent({})).score("c1") == 0.0


def test_a_method_that_cannot_be_called_is_named() -> None:
    class Needs(BaseInteraction):
        async def calculate_score(self, instance_id: str, weights: list[float]) -> float:  # type: ignore[override]
            return 0.0

    class Bare:
        async def generate_response(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Needs.calculate_score\(instance_id.* default"):
        adapted(Needs({}))
    with pytest.raises(ConfigError, match="Bare has no method 'start_interaction'"):
        adapted(Bare())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("Well done", r"must return \(should_terminate, text, score, metrics\), got 'Well done'"),
        ((True, "Well done", 1.0), r"must return \(should_terminate"),
        (("no", "Well done", 1.0, {}), r"should_terminate, the first value, .* got 'no'"),
        ((False, "Well done", 1.0, [1]), r"metrics, the last value, must be a dict, got \[1\]"),
    ],
)
async def test_a_wrong_return_value_is_named(returned: Any, message: str) -> None:
    class Wrong(BaseInteraction):
        async def generate_response(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            return returned

    with pytest.raises(InteractionContractError, match=f"Wrong.generate_response.*{message}"):
        await adapted(Wrong({})).reply("c1", [])


async def test_numbers_of_other_libraries_and_no_text_at_the_end() -> None:
    class Wrapped:
        def __init__(self, number: float) -> None:
            self.number = number

        def item(self) -> float:
            return self.number

    class Torch(BaseInteraction):
        async def generate_response(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            return Wrapped(True), None, Wrapped(0.5), None

    reply = await adapted(Torch({})).reply("c1", [])
    assert (reply.text, reply.done, reply.reward, reply.metrics) == ("", True, 0.5, {})


def test_which_classes_are_old() -> None:
    assert is_old_class(Count)
    assert is_old_class(Gsm8kInteraction)
    assert not is_old_class(Interaction)


WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("so #### 42", 1.0),
        ("#### 1 and #### 42", 1.0),
        ("#### 42 dollars", 1.0),
        ("#### 4,2", 1.0),
        ("42", 0.0),
        ("####42", 0.0),
        ("#### $42", 0.0),
        ("#### 42.", 0.0),
        ("#### 42.0", 0.0),
        ("#### 42 or #### 41", 0.0),
        ("#### 42" + " " * 300, 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
async def test_gsm8k_judges_as_verl_does(answer: str | None, score: float) -> None:
    interaction = adapted(Gsm8kInteraction({"name": "gsm8k"}))
    await interaction.start("c1", ground_truth="42")
    messages = [{"role": "assistant", "content": answer}, {"role": "user", "content": "#### 42"}]
    reply = await interaction.reply("c1", messages, ground_truth="42")
    right = score == 1.0
    assert (reply.done, reply.text, reply.reward) == (right, "Your response is correct!" if right else WRONG, score)
    assert await interaction.score("c1") == score
    await interaction.close("c1")
    assert interaction.old._instance_dict == {}


async def test_conversations_at_once_have_truths_of_their_own() -> None:
    interaction = adapted(Gsm8kInteraction({}))

    async def converse(number: int) -> float:
        await interaction.start(f"c{number}", ground_truth=str(number))
        await asyncio.sleep(0)
        await interaction.reply(f"c{number}", [{"role": "assistant", "content": f"#### {number % 5}"}])
        return float(await interaction.score(f"c{number}"))

    assert await asyncio.gather(*map(converse, range(10))) == [1.0] * 5 + [0.0] * 5


async def test_weather_asks_for_a_call() -> None:
    interaction = adapted(WeatherInteraction({}))
    await interaction.start("c1")
    said = await interaction.reply("c1", [{"role": "assistant", "content": "Sunny."}])
    asked = "Please use the weather tool to get the weather information."
    assert (said.done, said.text, said.reward) == (True, asked, 0.0)
    called = [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}]
    thanked = await interaction.reply("c1", called)
    assert (thanked.done, thanked.text, thanked.reward) == (True, "Thank you for your weather query!", 1.0)


def test_a_class_without_an_answer_says_so() -> None:
    class Mute(BaseInteraction):
        pass

    with pytest.raises(NotImplementedError, match="Mute must define generate_response"):
        asyncio.run(adapted(Mute({})).reply("c1", []))


async def test_an_old_yaml_and_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    path.write_text(
        f"interaction:\n- class_name: {__name__}.Truth\n  config: {{hint: none}}\n"
        "- name: gsm8k\n  class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n  config: {}\n"
    )
    loaded = load_interactions(path)
    assert {
        name: (user.name, type(user.old)) for name, user in loaded.items() if isinstance(user, AdaptedInteraction)
    } == {
        "truth": ("truth", Truth),
        "gsm8k": ("gsm8k", Gsm8kInteraction),
    }
    assert loaded["truth"].config == {"hint": "none", "name": "truth"}

    def choose(kwargs: dict[str, Any]) -> Any:
        return interaction_of_row({"extra_info": {"interaction_kwargs": kwargs}}, loaded, "data row 0")

    assert choose({"name": "truth", "truth": "4"}) == (loaded["truth"], {"truth": "4"})
    with pytest.raises(
        ConfigError, match=r"interaction 'truth': start_interaction.*missing a required argument: 'truth'"
    ):
        choose({"name": "truth"})
    async with InteractionSession(InteractionGate(loaded["truth"], 5.0), "c1", {"truth": "4"}) as session:
        assert await session.start() is None
        reply = await session.reply([{"role": "assistant", "content": "4"}])
        assert (reply.text, reply.reward, reply.done, reply.metrics) == ("4", 0.5, True, {"note": "text is kept"})
        assert await session.score() == 0.0
    assert loaded["truth"].old.ended == ["c1"]


class Truth(BaseInteraction):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.ended: list[str] = []

    async def start_interaction(self, instance_id: str | None = None, *, truth: str, **kwargs: Any) -> str:  # type: ignore[override]
        return str(instance_id)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return True, kwargs["truth"], 0.5, {"note": "text is kept"}

    async def finalize_interaction(self, instance_id: str) -> None:  # type: ignore[override]
        self.ended.append(instance_id)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("verl.interactions.base.BaseInteraction", r"does not define generate_response\(\)"),
        ("verl.interactions.base.Nothing", "cannot import|has no 'Nothing'"),
        ("builtins.dict", "is no interaction"),
    ],
)
def test_a_wrong_old_class_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_interaction_class(name)


def test_old_loops_get_objects_of_old_classes(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    path.write_text("interaction: [{class_name: verl.interactions.weather_interaction.WeatherInteraction, config: {}}]")
    (made,) = initialize_interactions_from_config(path).values()
    assert type(made) is get_interaction_class("verl.interactions.weather_interaction.WeatherInteraction")
    assert (type(made), made.name) == (WeatherInteraction, "weather")


LOOK = """
import sys
from verl_multiturn.interactions.old_verl import modules as verl_modules
verl_modules.install()
verl_modules.install()
assert "verl" not in sys.modules
"""


def run(program: str, folder: Path) -> str:
    """Run a program that finds packages of this folder first, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(folder)!r})\n{LOOK}{program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def package(folder: Path, *files: str) -> None:
    """Make a package `verl` with these files; each module has the attribute `own`."""
    for name in ("verl/__init__.py", *files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("own = True\n")


def test_old_imports_find_our_classes(tmp_path: Path) -> None:
    package(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from verl.interactions.base import BaseInteraction\n"
        "from verl.interactions.gsm8k_interaction import Gsm8kInteraction\n"
        "class Mine(BaseInteraction): pass\n"
        "class Mine2(Gsm8kInteraction): pass\n"
    )
    printed = run(
        "import mine, verl.interactions.weather_interaction as weather\n"
        "from verl_multiturn.interactions.old_verl import classes as verl_classes\n"
        "assert mine.Mine.__base__ is verl_classes.BaseInteraction\n"
        "assert mine.Gsm8kInteraction is verl_classes.Gsm8kInteraction\n"
        "assert weather.WeatherInteraction is verl_classes.WeatherInteraction\n"
        "assert verl_classes.__spec__.name == verl_classes.__name__\n"
        "from verl.interactions.utils.interaction_registry import get_interaction_class\n"
        "assert get_interaction_class('mine.Mine2') is mine.Mine2\n"
        "import importlib.util\n"
        "print(importlib.util.find_spec('verl.interactions.nowhere'))\n",
        tmp_path,
    )
    assert printed == "None\n"


def test_a_verl_that_has_them_keeps_its_own(tmp_path: Path) -> None:
    package(tmp_path, "verl/interactions/__init__.py", "verl/interactions/base.py")
    printed = run(
        "import verl.interactions.base\n"
        "print(verl.interactions.base.own)\n"
        "try:\n"
        "    import verl.interactions.gsm8k_interaction\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n",
        tmp_path,
    )
    assert printed == "True\nNo module named 'verl.interactions.gsm8k_interaction'\n"
    assert run(f"print(verl_modules.ours({GSM8K!r}))", tmp_path) == f"{GSM8K}\n"


GSM8K = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"


def test_a_yaml_is_read_without_importing_verl(tmp_path: Path) -> None:
    package(tmp_path)
    program = f"""
from verl_multiturn.interactions.running.registry import interaction_class
print(interaction_class({GSM8K!r}, "here").__module__, "verl" in sys.modules)
"""
    assert run(program, tmp_path) == "verl_multiturn.interactions.old_verl.classes False\n"


class OwnName:
    """An old class that derives from nothing and keeps a name of its own."""

    name = "verifier"

    def __init__(self, config: dict[str, Any]) -> None: ...

    async def start_interaction(self, instance_id: str, name: str) -> str:
        return instance_id

    async def generate_response(self, instance_id: str, messages: Any, name: str) -> tuple[bool, str, float, Any]:
        return True, name, 1.0, {}

    async def calculate_score(self) -> float:
        return 0.0

    async def finalize_interaction(self) -> None: ...


async def test_rows_choose_an_old_class_by_the_name_of_its_entry() -> None:
    entry = {"name": "judge", "class_name": f"{__name__}.OwnName"}
    interaction = build_interaction(entry, "users.yaml: interaction[0]")
    assert isinstance(interaction, AdaptedInteraction)
    assert interaction.name == "judge"
    row = {"interaction_kwargs": {"name": "judge"}}
    assert interaction_of_row(row, {interaction.name: interaction}, "row 0") == (interaction, {})
    assert (await interaction.reply("c1", [])).text == "judge"
