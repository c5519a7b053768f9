#!/usr/bin/env bash
# A tiny model learns tic-tac-toe by playing against itself, on a CPU, see README.md; the settings are in config.yaml.
#   bash recipes/tictactoe/run.sh [--variant one_side|older_self] [--seed N] [--steps N] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
on_cpu=1
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
