#!/usr/bin/env bash
# OTC: fewer tool calls for the same answers, on top of the recipe torl or search_r1, see README.md; the settings are in config.yaml.
#   bash recipes/otc/run.sh [--smoke] [--variant grpo|ppo] [--variant search] [any.verl.override=value ...]
# The variants of these recipes work as well.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
