"""Run `tests/long/training/interrupt.py`."""

import argparse
import json
import os

from tests.long.training import interrupt

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(interrupt.__doc__ or "").splitlines()[0])
    usual = interrupt.Amount()
    parser.add_argument("--k", type=int, nargs="+", default=usual.k, help="tokens from one stop to the next")
    parser.add_argument("--pauses", type=int, default=usual.pauses, help="pauses at random moments")
    parser.add_argument("--every", type=float, default=usual.every, help="mean seconds from one of them to the next")
    parser.add_argument("--conversations", type=int, default=usual.conversations, help="conversations at once")
    parser.add_argument("--control", type=int, default=usual.control, help="pauses of verl's own server")
    amount = interrupt.Amount(**vars(parser.parse_args()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for so small a model a second thread costs more than it brings
    print(json.dumps(interrupt.run(amount)))
