# shellcheck shell=bash
# Sets `python` for a run.sh, which sources this file with its own words: $PYTHON, or `python` from the path. In a checkout, a
# run on a CPU (`--smoke`, or `on_cpu=1` before) makes .venv and uses it.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python}"
if [[ -z "${PYTHON:-}" && -f "$root/scripts/environment.sh" && (-n "${on_cpu:-}" || " $* " == *" --smoke "*) ]]; then
    [[ " $* " == *" --print "* ]] || bash "$root/scripts/environment.sh"
    python="$root/.venv/bin/python"
fi
