#!/usr/bin/env bash
# ToRL: mathematics with Python in the text, GRPO from a base model on 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/torl/run.sh [--smoke] [--variant qwen2.5_math_7b|zerotir|simpletir|...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
