"""The certificate of verl's batches: which columns it reads, the check of rows, and the processes that share a batch.

columns.py   the columns of rows, out of TransferQueue
part.py      the check of some rows of a batch, wherever it runs
parts.py     the processes in which the parts of a large batch are checked

Nothing here imports verl: these processes start in a moment, and share nothing with the code that builds a batch.
"""
