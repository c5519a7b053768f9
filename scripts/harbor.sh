#!/usr/bin/env bash
# Makes .venv-harbor, in which Harbor runs trials (requirements/harbor.lock, Python 3.12), and tries the bridge to it on
# made tasks: in a workspace of the embedded sandbox, and in containers where podman runs them.
#   bash scripts/harbor.sh [NAME ...]     names as in scripts/harbor/__main__.py; all of them by default
#   bash scripts/harbor.sh --install      only makes the environment
# Python 3.12 is $PYTHON312, or one that is found on the PATH, or in pyenv's or uv's folder. The last line is one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
source scripts/install.sh
PYTHON="${PYTHON312:-}" install harbor .venv-harbor --anew
if [ "$*" = --install ]; then exit 0; fi
exec .venv/bin/python -m scripts.harbor "$@"
