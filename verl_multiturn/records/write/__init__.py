"""Writing records: encoding, redaction, and the threads that write."""
