#!/usr/bin/env bash
# Builds the wheel, and does all that a user without a checkout does with it, in an empty folder with an empty HOME: pip,
# `install cpu`, the quickstart, check-tool on the README's tool, and the viewer. Takes minutes and some 7 GB, which it
# frees at its end. The last line is one JSON object.
#   bash scripts/wheel.sh [--keep]
#   --keep   leaves the folder, whose path is in the JSON object
# Needs Python 3.11 ($PYTHON, or python3.11) and a package index; the caches of pip and uv are the user's own.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3.11}" -m scripts.wheel "$@"
