#!/usr/bin/env bash
# ReTool: competition mathematics with a code interpreter, GRPO on 4 nodes of 8 GPUs, see README.md; the settings are in config.yaml.
#   bash recipes/retool/run.sh [--smoke] [--variant qwen2.5_7b|ppo|...] [any.verl.override=value ...]
# It starts from the model that bash recipes/retool/sft.sh leaves; for another model: actor_rollout_ref.model.path=…
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
