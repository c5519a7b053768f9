#!/usr/bin/env bash
# OTC: fewer tool calls for the same answers, on top of another recipe: ToRL's, or Search-R1's. See README.md.
#   bash recipes/otc/run.sh [--smoke] [--variant grpo|ppo] [--variant search] [any.verl.override=value ...]
# The variants of the recipe beneath work as well.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
