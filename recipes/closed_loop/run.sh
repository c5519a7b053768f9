#!/usr/bin/env bash
# Three rounds of collecting, learning and deploying, on a CPU, see README.md; the settings are in config.yaml.
#   bash recipes/closed_loop/run.sh [--smoke] [--seed N] [--steps ROUNDS] [--out DIR] [KEY=VALUE ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
on_cpu=1
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
