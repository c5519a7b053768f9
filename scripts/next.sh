#!/usr/bin/env bash
# Makes .venv-next from requirements/next.lock, and tries the next set of versions in it: the names that we use, the tests,
# and two short trainings. The last line is one JSON object. Takes an hour or two on two cores; no GPU is needed.
#   bash scripts/next.sh [--only PART ...] [--sglang VERSION]
#   --only PART        contract, fast, stack, quickstart or image_zoom; repeatable; all of them by default
#   --sglang VERSION   asks only for the names, of another SGLang than the set's
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh --set next --with docs --with traces --with browser --with tasks --with a2a # as in test.sh
export VERL_PLATFORM=cpu PYTHON="$PWD/.venv-next/bin/python"
exec "$PYTHON" -m scripts.next_set "$@"
