"""Interactions of a YAML file, and the choice of one by a data row."""

from typing import Any

import pytest

from tests.unit.interactions.test_interactions import Guess
from verl_multiturn import Interaction
from verl_multiturn.errors import ConfigError


class WithoutId(Guess):
    def reply(self, messages: Any) -> Any:  # type: ignore[override]
        return None


class ScoresMessages(Guess):
    def score(self, instance_id: str, messages: Any) -> float:  # type: ignore[override]
        return 0.0


def test_loading(tmp_path: Any) -> None:
    from verl_multiturn.interactions.running.registry import load_interactions

    path = tmp_path / "users.yaml"

    def load(text: str) -> Any:
        path.write_text(text)
        return load_interactions(path)

    name = "tests.unit.interactions.test_interactions.Guess"
    loaded = load(f"interaction:\n- class_name: {name}\n  config: {{opens: false}}\n- {{class_name: {name}, name: b}}")
    assert list(loaded) == ["guess", "b"]
    assert loaded["guess"].config == {"opens": False}
    for text, said in [
        ("interaction: []", "non-empty list under 'interaction'"),
        ("interactions: [a]", "non-empty list under 'interaction', got {'interactions': ['a']}; did you mean 'interac"),
        ("tools: [a]", "; this is a tools' file; give it as tool_config_path (check-tool FILE, validate FILE)"),
        (f"interaction: [{{class_name: {name}}}]\ntools: [a]", "unknown key 'tools'; only 'interaction' is known, and"),
        (f"interaction: [{{class_name: {name}, nam: x}}]", "'nam'; did you mean 'name'?"),
        (f"interaction: [{{class_name: {name}}}, {{class_name: {name}}}]", "the name 'guess' is used twice"),
        (f"interaction: [{{class_name: {name}s}}]", "has no 'Guesss'"),
        ("interaction: [{class_name: collections.OrderedDict}]", "derive it from Interaction"),
        ("interaction: [{class_name: verl_multiturn.Interaction}]", "does not define reply()"),
        (f"interaction: [{{class_name: {name}, config: 3}}]", "expected a mapping, got 3"),
        (f"interaction: [{{class_name: {name}, limits: {{timeout: 3}}}}]", "timeout"),
        (f"interaction: [{{class_name: {__name__}.WithoutId}}]", "called as reply(instance_id, messages): too many"),
        (f"interaction: [{{class_name: {__name__}.ScoresMessages}}]", "interaction[0]: ScoresMessages.score("),
    ]:
        with pytest.raises(ConfigError, match=None) as raised:
            load(text)
        assert said in str(raised.value)


def test_the_choice_of_a_row() -> None:
    from verl_multiturn.interactions.running.registry import interaction_of_row

    users: dict[str, Interaction] = {"a": Guess(), "b": Guess()}

    def choose(kwargs: Any, known: dict[str, Interaction] | None = None) -> Any:
        row = {"extra_info": {"interaction_kwargs": kwargs}}
        return interaction_of_row(row, users if known is None else known, "data row 3")

    assert choose({"a": {"number": 3}, "b": None}) == (users["a"], {"number": 3})
    assert choose({"name": "b", "number": 3}) == (users["b"], {"number": 3})
    assert choose(None, {"a": users["a"]}) == (users["a"], {})
    assert choose(None, {}) == (None, {})
    for kwargs, said in [
        (None, "names none of the run's interactions ['a', 'b']; name one"),
        ({"a": {}, "b": {}}, "a conversation has one interaction"),
        ({"c": {}}, "names 'c', which is no interaction of the YAML"),
        ({"a": 3}, "must be a mapping, got 3"),
        ("a", "must map the name of an interaction to kwargs, got 'a'"),
    ]:
        with pytest.raises(ConfigError) as raised:
            choose(kwargs)
        assert str(raised.value).startswith("data row 3: ")
        assert said in str(raised.value)
    with pytest.raises(ConfigError, match="the run has no interactions"):
        choose({"a": {}}, {})
