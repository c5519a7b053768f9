"""Returns of typed functions: a reward counts, or the contract is broken by name; data stay data."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conftest import EchoTool
from tests.sessions import HI, session
from tests.unit.tools.test_functions import call
from verl_multiturn import ConfigError, ToolContractError, ToolResponse
from verl_multiturn.tools.loading.functions import function_tool


def returning(value: Any, annotation: Any = None) -> Callable[[], Any]:
    def check() -> Any:
        """Check."""
        return value

    if annotation is not None:
        check.__annotations__["return"] = annotation
    return check


SAID = ToolResponse("checked")


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (("checked", 0.5, None), 0.5),
        (("checked", 0.5, {}), 0.5),
        (("checked", None, {}), 0.0),
        (("checked", np.float32(0.5), {}), 0.5),
        (("checked", np.array(0.5), None), 0.5),
        (("checked", Decimal("0.5"), None), 0.5),
        (("checked", True, None), 1.0),
        ((SAID, 0.5, None), 0.5),
        ((SAID, None, None), 0.0),
        (("checked", float("nan"), {}), 0.0),
    ],
    ids=repr,
)
async def test_a_reward_counts_as_it_does_for_a_class(returned: Any, reward: float) -> None:
    result = await call(returning(returned), {})
    assert (result.text, result.reward) == ("checked", reward)
    async with session(EchoTool({"returns": returned})) as opened:
        (same,) = await opened.execute([HI])
    assert (same.text, same.reward) == ("checked", reward)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (("checked", "0.5", {}), "the reward of execute must be a number, got '0.5'; return one number"),
        (("checked", [0.5], {}), r"must be a number, got \[0.5\]; return one number"),
        (("checked", "0.5", None), "must be a number, got '0.5'"),
        (("checked", [0.5], None), r"must be a number, got \[0.5\]"),
        (("checked", np.array([0.5]), None), r"got array\(\[0.5\]\); return one number, such as value.item\(\)"),
        (({"a": 1}, "0.5", {}), "must be a number, got '0.5'"),
        ((SAID, "0.5", None), "must be a number, got '0.5'"),
        ((SAID, 0.5, "much"), "may be a reward or data"),
        (("checked", 0.5), r"which may be a reward or data; return \(text, reward, \{\}\) for a reward, or a dict"),
        (("checked", True), "may be a reward or data"),
        (("checked", Decimal("0.5")), "may be a reward or data"),
        (("checked", np.float32(0.5)), "may be a reward or data"),
        (("checked", np.array([0.5])), "may be a reward or data"),
        (["checked", 0.5, {}], "may be a reward or data"),
        (["checked", "0.5", {"n": 1}], "may be a reward or data"),
        ((SAID, 0.5), "may be a reward or data"),
        ((SAID, None), "may be a reward or data"),
        ([SAID], "may be a reward or data"),
        ((SAID, 0.5, {}, 1), "may be a reward or data"),
    ],
    ids=repr,
)
async def test_a_reward_that_cannot_count_breaks_the_contract(returned: Any, message: str) -> None:
    with pytest.raises(ToolContractError, match=f"^tool 'check': .*{message}"):
        await call(returning(returned), {})


class Place(NamedTuple):
    name: str
    latitude: float


class Judged(NamedTuple):
    text: str
    reward: float
    metrics: dict[str, int]


@pytest.mark.parametrize(
    ("returned", "annotation", "text"),
    [
        ((48.9, 2.4), None, "[48.9,2.4]"),
        ((48.9, 2.4, None), None, "[48.9,2.4,null]"),
        (("Paris", "75000"), None, '["Paris","75000"]'),
        (("Paris", None), None, '["Paris",null]'),
        (("John", "Smith", None), None, '["John","Smith",null]'),
        (("John", None, None), None, '["John",null,null]'),
        (("Paris", 48.9, 2.4), None, '["Paris",48.9,2.4]'),
        (["Paris", 2.1], None, '["Paris",2.1]'),
        ([["Paris", 2.1, {}]], None, '[["Paris",2.1,{}]]'),
        (("Paris", 2.1, None), tuple[str, float, float | None], '["Paris",2.1,null]'),
        (("Paris", 2.1, None), tuple[str, float, float | None] | None, '["Paris",2.1,null]'),
        (Place("Paris", 48.9), Place, '["Paris",48.9]'),
        ((), None, "[]"),
        (("one",), None, '["one"]'),
        ({"a": np.int64(1), "b": {"\ud800"}}, None, '{"a":1,"b":["?"]}'),
    ],
    ids=repr,
)
async def test_data_stay_data(returned: Any, annotation: Any, text: str) -> None:
    result = await call(returning(returned, annotation), {})
    assert (result.text, result.reward) == (text, 0.0)


@pytest.mark.parametrize(
    "annotation",
    [tuple[str, float, dict[str, int]], tuple[str, float, dict[str, int] | None], tuple[str, float, Any], Judged],
)
async def test_an_annotation_may_name_a_result(annotation: Any) -> None:
    returned = Judged("checked", 0.5, {}) if annotation is Judged else ("checked", 0.5, {})
    assert (await call(returning(returned, annotation), {})).reward == 0.5


@pytest.mark.parametrize(
    "annotation", [tuple[str, bool], tuple[str, Decimal], tuple[str, float] | None, tuple[str, np.float32]], ids=str
)
def test_a_pair_of_a_text_and_any_number_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(ConfigError, match="no reward"):
        function_tool(returning(None, annotation))


@pytest.mark.parametrize("value", [object(), {"a": [object()]}], ids=["alone", "inside"])
async def test_what_json_cannot_express_is_named_with_its_place(value: Any) -> None:
    place = "" if not isinstance(value, dict) else r" at \['a'\]\[0\]"
    with pytest.raises(
        ToolContractError,
        match=rf"^tool 'check': execute returned what JSON cannot express: <object object> of type object{place}; ret",
    ):
        await call(returning(value), {})
    with pytest.raises(ToolContractError, match="what JSON cannot express"):
        await call(returning((value, 0.5, {})), {})
