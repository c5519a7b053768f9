#!/usr/bin/env bash
# Four tasks with four tools in one batch: GRPO on 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/mixed/run.sh [--smoke] [--variant ...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
