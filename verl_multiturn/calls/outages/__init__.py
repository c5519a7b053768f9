"""Outages: which failures are no one's mistake, when they are an outage of the run, and how its calls wait for the end.

`causes.py` finds who caused a failure, and `authorship.py` who wrote the address or the text that failed. `breaker.py`
decides, from the calls of a run, whether a service is there. `keeper.py` keeps the breakers of a run, and `messages.py`
has its requests and answers. `process.py` has the state that one process knows, and `guarded_call.py` wraps each call.

Five rules: failures that the model caused never count; as many of the last calls failed as did not: calls wait, and
those that have just failed and may be repeated; three probes in a row were answered: all go on; conversations that hit
the outage are not trained; after `stop_s` the run ends.
"""
