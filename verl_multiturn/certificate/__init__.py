"""The proof of each trained token: receipts, the check of a batch, records."""
