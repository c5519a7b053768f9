#!/usr/bin/env bash
# Environments of verifiers' hub, see README.md; the settings are in config.yaml.
#   bash recipes/hub/run.sh [--smoke] [--variant openenv|words] [--seed N] [--steps N] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
