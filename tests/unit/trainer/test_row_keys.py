import pytest

from verl_multiturn.rows.keys import RowKey


def test_the_parts_of_a_name() -> None:
    key = RowKey.parse("a-b_c_3_12")
    assert (key.uid, key.session, key.number, key.conversation) == ("a-b_c", "3", 12, "a-b_c_3")
    assert RowKey.parse("a-b") == ("a-b", None, None)  # a prompt
    assert [RowKey.parse(name).number for name in ("u", "u_0_x", "u_0_-1")] == [-1, -1, -1]


@pytest.mark.parametrize("name", ["u", "u_1", "u_1_2", "a_b_1_2", "u__0", "_1_0", "u_0_", "", "_"])
def test_a_name_comes_back_as_it_was(name: str) -> None:
    assert str(RowKey.parse(name)) == name
