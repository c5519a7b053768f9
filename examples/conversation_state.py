"""A tool with state for each conversation: each has an account of its own, with the money that its data row gives."""

import asyncio

from verl_multiturn import BaseTool, ToolResponse, ToolSchema, scripted_rollout
from verl_multiturn.runs.data import tool_call

PARAMETERS = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}
FUNCTION = {"name": "pay", "description": "Pay an amount.", "parameters": PARAMETERS}


class Pay(BaseTool):
    def __init__(self):
        super().__init__({}, ToolSchema.read({"type": "function", "function": FUNCTION}, "Pay"))
        self.left = {}  # by conversation

    async def create(self, instance_id, money=0, **kwargs):  # `money` comes from the data row
        self.left[instance_id] = money

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["amount"] > self.left[instance_id]:
            raise ValueError(f"only {self.left[instance_id]} left")  # the model reads this text
        self.left[instance_id] -= parameters["amount"]
        return ToolResponse(f"paid, {self.left[instance_id]} left"), 0.5, {}  # 0.5 is a step reward

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.left[instance_id])

    async def release(self, instance_id, **kwargs):
        self.left.pop(instance_id, None)  # runs also if `create` failed


tool, turns = Pay(), [tool_call("pay", {"amount": 7}), "Done."]
for money in (10, 5):
    row = {"pay": {"create_kwargs": {"money": money}}}
    outcome = asyncio.run(scripted_rollout([tool], turns, "Pay 7.", tools_kwargs=row))
    call = outcome.calls[0]
    print(f"{call.status}: {call.text!r}, step reward {call.reward}, calc_reward {outcome.calc_rewards['pay']}")
print("state after both conversations:", tool.left)
