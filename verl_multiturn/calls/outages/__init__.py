"""Outages: which failures are nobody's mistake, when they are an outage of the run, and how its calls wait for the end.

`causes.py` says whose a failure is, and `authorship.py` who wrote the address or the text that failed. `breaker.py`
decides, from the calls of a run, whether a service is there. `keeper.py` keeps the breakers of a run, and `messages.py`
has what it is told and asked. `process.py` has what one process knows of them, and `guarded_call.py` stands beside each
call.

Five rules: what the model caused counts nowhere; as many of the last calls failed as did not: calls wait, and those
that have just failed and may be repeated; three probes in a row were answered: all go on; what met the outage is not
trained; after `stop_s` the run ends.
"""
