"""Differences between the versions of verl, SGLang and Ray that this package supports, and nothing else.

`contract.py` has all foreign names that we use, in `contract.tsv`; `engine.py` has the names of SGLang that moved;
`row_store.py` has the rows and batches of TransferQueue. The sets of versions are in `version_sets.py` above, which
imports none of the packages. No other room asks for a foreign version, or catches a foreign ImportError.

Importing `row_store.py` imports no verl: the processes that verify parts of a batch need nothing else of it.
"""
