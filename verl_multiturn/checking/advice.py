"""Advice of `check-tool` to a tool's author, by the name of the check: for a class, and for a function."""

from __future__ import annotations

_FOR_ALL = {
    "example": "give --arguments",
    "row kwargs": "give them as a data row does: --create-kwargs, --execute-kwargs, --interaction-kwargs; with "
    "--tool NAME, of a YAML",
    "world": "if the tool shares the world of an interaction, name it: --interaction; else keep what belongs to a "
    "conversation from create on",
    "guess": "give --arguments that it takes: the checks say more then",
    "given data": "copy it first: here each call gets a copy of its own, in other loops a group shares its row",
    "create raised": "raise ValueError for a wrong row, OutageError for a service that is down; else mend that line. "
    "Kwargs of a row: --create-kwargs",
    "execute raised": "raise ValueError for the model's mistake, OutageError for a service that is down; else mend "
    "that line",
    "calc_reward raised": "raise UnjudgedError where it cannot judge, for a cause of yours; else mend that line",
    "cancel": "let CancelledError pass, and clean up in `finally` or with `async with`",
    "late": "let each wait and loop in it end; start the server that it waits for; give a slow one more time: "
    "--timeout-s",
    "outage": "do what the error names; start the service where it is down, and check again",
    "seats": "wait for nothing that another conversation holds",
    "concurrency": "calls wait for each other; let them run side by side",
    "addresses": "write `limits: {outage: {addresses: model}}` into the YAML where the tool opens this address: a "
    "failure there is then the model's mistake; raise OutageError where your own service fails. Write `addresses: "
    "service` where the tool opens your addresses alone",
    "answer size": "say what matters: the rest is cut off",
}
CLASS = _FOR_ALL | {
    "schema": "describe it in the tool_schema, or drop it",
    "name": "use letters, digits, _ and -",
    "descriptions": "describe them in the tool_schema: the model reads nothing else",
    "descriptions of a server": "describe them in the server: the model reads nothing else",
    "create": "return None, the id, or (id, response); kwargs of a row: --create-kwargs",
    "execute": "return a ToolResponse, text, or (response, reward, metrics)",
    "calc_reward": "return a finite number",
    "release": "give everything back, and raise nothing",
    "every call": "return a result from every call",
    "event loop": "every conversation waits meanwhile: await, use asyncio.to_thread, or make the method synchronous",
    "leftovers": "give it back in release",
    "release after a failed create": "release is called whenever create began: look the conversation up with "
    "pop(instance_id, None)",
    "isolation": "keep what belongs to a conversation under its instance_id, as in self.goals[instance_id]",
    "state per worker": "set `per: conversation` in the entry of the server; where it keeps a file, put "
    "${conversation.folder} into its args, env or cwd",
    "state per conversation": "the servers share a file or a service: put ${conversation.folder} or ${conversation.id} "
    "into the setting that names it",
    "bad arguments": "let the schema refuse them (required, type), or raise ValueError with a word for the model",
}
"""Advice for a class with the four methods."""
FUNCTION = CLASS | {
    "name": "use letters, digits, _ and -: @tool(name=…)",
    "descriptions": "write a docstring with an `Args:` section: the model reads nothing else",
    "execute": "return text, a ToolResponse, (response, reward, metrics), or what JSON can express",
    "event loop": "every conversation waits meanwhile: await, use asyncio.to_thread, or write `def`, not `async def`: "
    "it runs in a thread then",
    "leftovers": "give it back before the function returns, with `with` or in `finally`",
    "isolation": "keep nothing in globals between calls; what has a state for each conversation is a class with create "
    "and release",
    "bad arguments": "let the annotations refuse them (Literal[…], Annotated[str, Field(min_length=1)]), or raise "
    "ValueError with a word for the model",
}
"""Advice for a function, which has no methods."""
