#!/usr/bin/env bash
# Makes .venv from requirements/cpu.lock and installs this package into it. Does nothing if .venv is up to date.
#   bash scripts/environment.sh [--set next] [--with NAME ...]
#   --set next   makes .venv-next from requirements/next.lock instead: the next set of versions (scripts/next.sh)
#   --with NAME  also installs requirements/NAME.lock, such as tasks; repeatable
set -euo pipefail
cd "$(dirname "$0")/.."

lock=cpu venv=.venv extras=()
while [ $# -gt 0 ]; do
    case "$1 ${2:-}" in
        "--set next") lock=next venv=.venv-next ;;
        "--with "?*) extras+=(--with "$2") ;;
        *) echo "environment: unknown arguments '$*'; expected none, or --set next, or --with NAME" >&2 && exit 2 ;;
    esac
    shift 2
done
source scripts/install.sh
install $lock $venv --anew --with templates "${extras[@]}"
