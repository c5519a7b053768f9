#!/usr/bin/env bash
# A tiny model learns what "there" means in a dialogue, on a CPU, see README.md; the settings are in config.yaml.
#   bash recipes/errands/run.sh [--smoke] [--variant lottery] [--seed N] [--steps N] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
on_cpu=1
extras=tasks
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
