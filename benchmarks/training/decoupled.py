"""Run `tests/long/training/decoupled.py`."""

import argparse
import json

import torch

from tests.long.training import decoupled

if __name__ == "__main__":
    described = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=decoupled.__doc__, formatter_class=described).parse_args()
    torch.set_num_threads(1)  # with tensors this small, threads cost more than they save
    print(json.dumps(decoupled.run(12)))
