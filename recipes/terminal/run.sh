#!/usr/bin/env bash
# Tasks for a shell in Harbor's form, see README.md; the settings are in config.yaml.
#   bash recipes/terminal/run.sh [--smoke] [--variant harbor] [--seed N] [--steps N] [--data FOLDER] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../common/python.sh"
exec "$python" -m verl_multiturn.cli run "$here" "$@"
