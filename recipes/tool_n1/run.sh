#!/usr/bin/env bash
# Tool-N1: one step, the right calls with the right arguments, GRPO on 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/tool_n1/run.sh [--smoke] [--variant qwen2.5_14b|...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
