# shellcheck shell=bash
# Set the variable `python` for a run.sh, which sources this file: $PYTHON, or `python` from the PATH. This file sees the
# arguments of run.sh. If PYTHON is not set, a run on a CPU in a checkout makes .venv and uses its Python (with `--print`, it
# makes nothing). A run is on a CPU with `--smoke`, or if run.sh sets `on_cpu=1` before. What such a run needs beside
# requirements/cpu.lock, run.sh names in `extras`: `extras=tasks` is requirements/tasks.lock.
# `--help` prints the comment at the top of run.sh, and makes nothing.
case " $* " in
*" --help "* | *" -h "*) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p;}' "$0" && exit 0 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python}"
if [[ -z "${PYTHON:-}" && -f "$root/scripts/environment.sh" && (-n "${on_cpu:-}" || " $* " == *" --smoke "*) ]]; then
    if [[ " $* " != *" --print "* ]]; then
        bash "$root/scripts/environment.sh" ${extras:+--with "$extras"}
    fi
    python="$root/.venv/bin/python"
    unset PYTHONDONTWRITEBYTECODE # many containers set it; each process would then compile torch, verl and SGLang anew
fi
