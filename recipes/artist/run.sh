#!/usr/bin/env bash
# BFCL's multi-turn dialogues, see README.md; the settings are in config.yaml.
#   bash recipes/artist/run.sh [--smoke] [--variant all|turns] [--seed N] [--steps N] [--data CATEGORIES] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
extras=tasks
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
