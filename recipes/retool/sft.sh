#!/usr/bin/env bash
# ReTool's cold start: verl's own SFT trainer on conversations with tool calls, before run.sh.
#   bash recipes/retool/sft.sh [--smoke] [--variant qwen2.5_7b] [any.verl.override=value ...]
# With several nodes, start it on each node, with NODE_RANK, MASTER_ADDR and, if needed, MASTER_PORT set. It leaves the
# model in OUT/model, where run.sh looks for it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here/sft" "$@"
