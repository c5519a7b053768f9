#!/usr/bin/env bash
# Runs 15 agent programs, unmodified, against the endpoint on a scripted engine, each with a real tool. Installs them,
# pinned, each into an environment of its own below $HARNESSES (default: ~/.cache/verl-multiturn/harnesses; some 4 GB).
#   bash scripts/harnesses.sh [NAME ...]     such as codex, or smolagents.code; all of them by default
# Needs Python 3.11, Node 20 or newer and npm. The last line is one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
exec .venv/bin/python -m scripts.harnesses "$@"
