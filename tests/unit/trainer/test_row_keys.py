import pytest

from verl_multiturn.row_keys import RowKey


def test_the_parts_of_a_name() -> None:
    key = RowKey.parse("u_1_2")
    assert key == RowKey("u", "1", "2")
    assert (key.conversation, key.number) == ("u_1", 2)


@pytest.mark.parametrize("name", ["u", "u_1", "u_1_2", "a_b_1_2", "u__0", "_1_0", "u_0_", "", "_"])
def test_a_name_comes_back_as_it_was(name: str) -> None:
    assert str(RowKey.parse(name)) == name
