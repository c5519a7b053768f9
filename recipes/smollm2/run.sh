#!/usr/bin/env bash
# A real language model learns to use a calculator, on a CPU: SmolLM2-135M-Instruct, GRPO, see README.md; the settings are in config.yaml.
#   bash recipes/smollm2/run.sh [--smoke] [--variant no_tool] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
on_cpu=1
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
