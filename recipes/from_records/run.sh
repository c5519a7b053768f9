#!/usr/bin/env bash
# Learn from recorded conversations, see README.md; the settings are in config.yaml.
#   bash recipes/from_records/run.sh [--smoke] [--variant rl] 'recipe.records=[DIR,...]' [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
