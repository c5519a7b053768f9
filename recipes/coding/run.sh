#!/usr/bin/env bash
# Competition programming without tools: AReaL's coding runs, a reward for all tests or none, see README.md; the settings are in config.yaml.
#   bash recipes/coding/run.sh [--smoke] [--variant areal_8b|areal_14b|sandbox|...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
