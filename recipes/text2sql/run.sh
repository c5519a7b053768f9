#!/usr/bin/env bash
# SkyRL-SQL: text to SQL over several turns, GRPO on 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/text2sql/run.sh [--smoke] [--variant strict|...] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
