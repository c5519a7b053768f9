"""Problems of many rows as one line."""

from verl_multiturn.checking.problem_groups import gather_alike


def test_numbers_that_differ_are_a_range() -> None:
    problems = [
        f"row {row}: the prompt has {tokens} tokens, and may have 320" for row, tokens in enumerate((385, 387, 386))
    ]
    assert gather_alike(problems) == ["rows 0, 1, 2: the prompt has 385 to 387 tokens, and may have 320"]


def test_each_kind_is_a_line_in_the_order_of_its_first() -> None:
    problems = ["row 0: no 'b'", "row 1: 3 tokens", "row 2: no 'b'", "row 7: no 'c'"]
    assert gather_alike(problems) == ["rows 0, 2: no 'b'", "row 1: 3 tokens", "row 7: no 'c'"]


def test_a_number_with_a_point_is_one_number() -> None:
    problems = [
        "row 0: temperature 1.5, from -3 on",
        "row 1: temperature 12, from -20 on",
        "row 2: temperature 2.25, from -3 on",
    ]
    assert gather_alike(problems) == ["rows 0, 1, 2: temperature 1.5 to 12, from -20 to -3 on"]


def test_digits_of_names_and_texts_are_no_numbers() -> None:
    for problems in (
        ["row 0: no tool 'add_1'", "row 1: no tool 'add_7'"],
        ["row 0: got '0012'", "row 1: got '12'"],
        ["row 0: since 2024-05-01", "row 1: since 2024-06-01"],
        ["row 0: verl 0.9.1", "row 1: verl 0.9.2"],
    ):
        assert gather_alike(problems) == problems


def test_five_rows_are_named() -> None:
    assert gather_alike(f"row {row}: x" for row in range(32)) == ["rows 0, 1, 2, 3, 4 and 27 more: x"]


def test_text_that_names_no_row_stays() -> None:
    assert gather_alike(["a file of 3 bytes", "a file of 4 bytes"]) == ["a file of 3 bytes", "a file of 4 bytes"]
    assert gather_alike(["row 0: 5%, or 5%"]) == ["row 0: 5%, or 5%"]


def test_a_sentence_about_a_row_is_gathered_too() -> None:
    problems = ["row 0 has no data_source; write one", "row 4 has no data_source; write one"]
    assert gather_alike(problems) == ["rows 0, 4: has no data_source; write one"]
