"""Whether a model and tools are those of a recorded run."""

from typing import Any

import pytest

from verl_multiturn.errors import ConfigError
from verl_multiturn.records.read.origin import names_of, refuse_other
from verl_multiturn.records.write.run_file import digest, digest_of_vocabulary

VOCABULARY, TEMPLATE = {"a": 0, "b": 1}, "{{ messages }}"
REMEDIES = {"tokenizer": "take another", "template": "set one", "tools": "name others"}


def schema(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


RUN = {
    "tokenizer": {"digest": digest_of_vocabulary(VOCABULARY)},
    "template": {"digest": digest(TEMPLATE.encode())},
    "schemas": [schema("add"), schema("ask")],
}


def test_the_same_passes_and_so_does_what_is_not_looked_at_or_not_known() -> None:
    refuse_other(RUN, REMEDIES, vocabulary=VOCABULARY, template=TEMPLATE, schemas=[schema("add"), schema("ask")])
    refuse_other(RUN, {})
    for run in ({}, {"tokenizer": {}, "template": None, "schemas": None}):
        refuse_other(run, REMEDIES, vocabulary={}, template="", schemas=[])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vocabulary": {"a": 1}}, "the tokenizer of 'm' is another than the run's; take another"),
        ({"template": ""}, "the chat template of 'm' is another than the run's; set one"),
        (
            {"schemas": [schema("ask"), schema("add")]},
            r"the tools are \['ask', 'add'\], the run's \['add', 'ask'\]",
        ),
        ({"schemas": []}, r"the tools are \[\], the run's \['add', 'ask'\]; name others"),
        (
            {"schemas": [schema("add"), schema("ask", description="{x}")]},
            "the schema of tool 'ask' is another than the run's; name others",
        ),
    ],
)
def test_what_is_another_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_other(RUN, REMEDIES, model="'m'", **given)


@pytest.mark.parametrize("odd", [{}, {"name": "add"}, {"function": None}, {"function": {"name": 1}}, "add", None])
def test_what_is_no_schema_in_a_runs_file_is_refused_by_its_place(odd: Any) -> None:
    said = r"the run's schemas\[1\] is .*, expected a tool's schema, with the name in its `function`; take the file"
    with pytest.raises(ConfigError, match=said):
        names_of([schema("add"), odd])
    with pytest.raises(ConfigError, match=said):
        refuse_other({"schemas": [schema("add"), odd]}, REMEDIES, schemas=[schema("add")])
    assert names_of([schema("add"), schema("ask")]) == ["add", "ask"]
