"""Outages: which failures are nobody's mistake, when they are an outage of the run, and how its calls wait for the end.

`causes.py` says whose a failure is, and `authorship.py` who wrote the address or the text that failed. `breaker.py`
decides, from the calls of a run, whether a service is there. `keeper.py` keeps the breakers of a run. `watch.py` stands
beside each call of a process.
"""
