#!/usr/bin/env bash
# mini-swe-agent mends mistakes in real packages, see README.md; the settings are in config.yaml.
#   bash recipes/swe/run.sh [--smoke] [--seed N] [--steps N] [--variant deepswe|rebench] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
extras=tasks
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
