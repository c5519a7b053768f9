"""Looking at a run: metrics, records, the certificate, and the checks of `verl-multiturn doctor`."""
