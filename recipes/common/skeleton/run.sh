#!/usr/bin/env bash
# NAME, see README.md; the settings are in config.yaml.
#   bash recipes/NAME/run.sh [--smoke] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
