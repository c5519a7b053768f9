#!/usr/bin/env bash
# Search-R1: questions answered with a search engine, GRPO on 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/search_r1/run.sh [--smoke] [--variant f1|ppo|qwen2.5_7b|...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
