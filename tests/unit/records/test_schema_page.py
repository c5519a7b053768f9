"""The page of records agrees with `schema`."""

from verl_multiturn.records import schema
from verl_multiturn.records.schema_page import BEGIN, END, PAGE, models, write_page


def test_the_page_is_what_the_schema_writes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert write_page(page) == page  # python -m verl_multiturn.records.schema_page writes it


def test_each_entry_and_column_is_on_the_page() -> None:
    listed = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    for model in models():
        section = listed.partition(f"### {model.__name__}\n")[2].partition("\n### ")[0]
        names = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
        assert names == [field.alias or name for name, field in model.model_fields.items()], model
    columns = listed.partition("### The join\n")[2]
    assert [line.split("`")[1] for line in columns.splitlines() if line.startswith("| `")] == schema.JOINED.names


def test_a_section_begins_with_what_the_model_is_and_where() -> None:
    listed = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert not [line for line in listed.splitlines() if line.startswith(" ")]  # Markdown would show it as code
    said = "its beginning or its outcome, in `….lines.jsonl`.\n\nAn entry that has its default is omitted"
    assert said in listed
    assert "A line in `steps.jsonl`: a step of the trainer, or a validation, that is over.\n" in listed
