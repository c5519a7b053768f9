#!/usr/bin/env bash
# GSM8K with the answer-checking tool: GRPO on 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/gsm8k_multiturn/run.sh [--smoke] [--variant qwen3|no_tool|shaped|...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
