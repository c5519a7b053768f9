"""The bridge to verifiers, tried with verifiers itself (`scripts/verifiers.sh`)."""
