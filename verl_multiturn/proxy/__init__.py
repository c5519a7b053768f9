"""Agents of others behind an endpoint: their sessions become rows of the batch.

The way of one request: `server` reads HTTP, a module of `protocols` reads the body as a `ChatRequest`, `session` finds
the completion that it continues and calls the engine, and the protocol writes the `Completion`s back. When the agent is
done, `forest` gives the completions of each row.

No module here imports verl, Ray or SGLang.
"""
