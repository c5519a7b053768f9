#!/usr/bin/env bash
# A vision-language model that looks closer at pictures: GRPO on 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/image_zoom/run.sh [--smoke] [--variant deepeyes|qwen3_vl|...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
