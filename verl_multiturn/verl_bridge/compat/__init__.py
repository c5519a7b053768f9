"""What differs between the versions of verl, SGLang and Ray that this package supports, and nothing else.

`version_sets.py` has the sets; `contract.py` has all foreign names that we use; `engine.py` has the names that moved;
`queue.py` has the batches of TransferQueue. No other room asks for a foreign version, or catches a foreign ImportError.
"""
