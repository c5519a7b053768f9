#!/usr/bin/env bash
# Makes .venv from requirements/cpu.lock and installs this package into it. Does nothing if .venv is up to date.
#   bash scripts/environment.sh [--set next]
#   --set next   makes .venv-next from requirements/next.lock instead: the next set of versions (scripts/next.sh)
set -euo pipefail
cd "$(dirname "$0")/.."

lock=cpu venv=.venv
case "$*" in
    "") ;;
    "--set next") lock=next venv=.venv-next ;;
    *) echo "environment: unknown arguments '$*'; expected none, or --set next" >&2 && exit 2 ;;
esac
stamp="$(cat requirements/{$lock,templates,uv}.lock setup.py | sha256sum | cut -d' ' -f1) $PWD"
if [ "$(cat $venv/.stamp 2>/dev/null)" = "$stamp" ]; then exit 0; fi

python="${PYTHON:-$(command -v python3.11 || true)}"
if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "environment: Python 3.11 is needed and '${python:-python3.11}' is not it; install it, or name it with PYTHON=/path/to/python3.11" >&2
    exit 1
fi
# In an activated environment, that is the Python that is about to be removed: take the one that made it.
python="$("$python" -c 'import sys; print(sys._base_executable)')"
echo "environment: installing the locked packages into $venv (some 6 GB; minutes, most of them the download)" >&2
rm -rf $venv
"$python" -m venv $venv
source scripts/install.sh
# Into a folder of its own, which nothing imports: requirements/templates.lock says why.
install $venv --target $venv/share/templates -r requirements/templates.lock
install $venv -r requirements/$lock.lock
install $venv --no-build-isolation -e .
echo "$stamp" > $venv/.stamp
