"""Roll out a typed function with the scripted engine, and print where the tokens come from."""

import asyncio
from collections import Counter
from typing import Annotated, Literal

from verl_multiturn import scripted_rollout
from verl_multiturn.rollout.scripted_chat import transcript
from verl_multiturn.runs.data import tool_call
from verl_multiturn.tools.loading.functions import FromRow


def convert(value: float, unit: Literal["km", "mile"], *, digits: Annotated[int, FromRow] = 1) -> str:
    """Convert a distance to the other unit.

    Args:
        value: How many.
        unit: Unit of the value.
        digits: Digits after the point; from the data row, so the model is not told about it.
    """
    factor, other = (1.609344, "km") if unit == "mile" else (1 / 1.609344, "mile")
    return f"{value * factor:.{digits}f} {other}"


turns = [
    tool_call("convert", {"value": 26.2, "unit": "yard"}),  # a mistake: the model reads the error
    tool_call("convert", {"value": 26.2, "unit": "mile"}),
    "A marathon has 42.16 km.",
]
row = {"convert": {"execute_kwargs": {"digits": 2}}}  # arguments from a data row
outcome = asyncio.run(scripted_rollout([convert], turns, "How long is a marathon in km?", tools_kwargs=row))

for source, text in transcript(outcome)[1:]:  # without the prompt; only SAMPLED text is trained
    print(f"{source.name:11} {text!r}")
counts = Counter(source.name for source in outcome.trajectory.sources)
print(f"trained: {sum(outcome.trajectory.mask)} of {len(outcome.trajectory)} tokens;", dict(counts))
print("calls:", ", ".join(call.status for call in outcome.calls), "| ended:", outcome.stop_reason)
