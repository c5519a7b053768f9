#!/usr/bin/env bash
# Makes an environment for GPUs from requirements/gpu.lock, adds flash-attn, and installs this package into it.
#
#   bash scripts/install_gpu.sh [--flash-attn WHEEL | --without-flash-attn] [--venv DIR]
#
#   --flash-attn WHEEL     path or address of a wheel of flash-attn 2.8.3 for Python 3.12, torch 2.11 and CUDA 13
#   --without-flash-attn   no flash-attn; start recipes with `--variant without_flash_attn` then
#                          Without either option it is built from source: CUDA 13's compiler, and an hour or more.
#   --venv DIR             where the environment is made, or repaired; default: .venv-gpu
#
# Needs Linux on x86-64 with glibc 2.34 or newer, Python 3.12 ($PYTHON, or python3.12), and some 20 GB of disk.
set -euo pipefail

flash_attn_version=2.8.3
cuda=13

fail() {
    echo "install_gpu: $1" >&2
    exit "${2:-1}"
}

root="$(cd "$(dirname "$0")/.." && pwd)"
venv="$root/.venv-gpu" flash_attn=source wheel=""
while [ $# -gt 0 ]; do
    case "$1" in
        --flash-attn | --venv)
            [ $# -gt 1 ] || fail "$1 needs a value" 2
            case "$1" in
                --flash-attn) wheel="$2" flash_attn=wheel ;;
                --venv) venv="$2" ;;
            esac
            shift
            ;;
        --without-flash-attn) flash_attn=none ;;
        -h | --help) sed -n 's/^# \{0,1\}//; 2,11p' "$0" && exit ;;
        *) fail "unknown argument '$1'; expected --flash-attn WHEEL, --without-flash-attn or --venv DIR" 2 ;;
    esac
    shift
done
if [[ -n "$wheel" && "$wheel" != *://* ]]; then
    [ -f "$wheel" ] || fail "--flash-attn '$wheel': no such file" 2
    wheel="$(realpath "$wheel")"
fi
venv="$(realpath -m "$venv")"

# These checks come first, since everything else takes minutes.
if [ -e "$venv" ]; then
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
        fail "'$venv' exists and is no environment of Python 3.12; remove it, or name another with --venv"
    python=""
else
    python="${PYTHON:-$(command -v python3.12 || true)}"
    "${python:-python3.12}" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
        fail "Python 3.12 is needed and '${python:-python3.12}' is not it; install it, or name it with PYTHON=/path/to/python3.12"
fi
has_flash_attn() { # is it installed, and does it fit torch? A wheel for another torch or CUDA fails here.
    "$venv/bin/python" -c "
import importlib.metadata, torch, flash_attn_2_cuda
assert importlib.metadata.version('flash-attn').split('+')[0] == '$flash_attn_version'"
}
if [ "$flash_attn" = source ] && ! has_flash_attn 2>/dev/null; then
    nvcc="${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
    [ -x "$nvcc" ] || nvcc="$(command -v nvcc || true)"
    [[ -n "$nvcc" && "$("$nvcc" --version)" == *"release $cuda."* ]] ||
        fail "building flash-attn needs CUDA $cuda's nvcc, and '${nvcc:-nvcc}' is not it; set CUDA_HOME, or give --flash-attn WHEEL or --without-flash-attn"
fi

[ -z "$python" ] || "$python" -m venv "$venv"
cd "$root"
source scripts/install.sh
echo "install_gpu: installing the locked packages into $venv (some 11 GB)" >&2
install "$venv" -r requirements/gpu.lock

if [ "$flash_attn" != none ] && ! has_flash_attn 2>/dev/null; then
    if [ "$flash_attn" = wheel ]; then
        install "$venv" --reinstall "$wheel"
    else
        echo "install_gpu: building flash-attn $flash_attn_version (MAX_JOBS bounds the jobs; each takes some 9 GB of memory)" >&2
        # Without this variable, its setup looks for a wheel for CUDA 12, whatever torch has.
        FLASH_ATTENTION_FORCE_BUILD=TRUE install "$venv" --no-build-isolation --no-binary flash-attn --reinstall \
            "flash-attn==$flash_attn_version"
    fi
    # SGLang needs `flash_attn.cute` from flash-attn-4. The installation of flash-attn has just replaced it by an older one.
    install "$venv" --reinstall "$(grep '^flash-attn-4==' requirements/gpu.lock)"
    has_flash_attn || fail "flash-attn ${wheel:+from '$wheel' }is not $flash_attn_version for Python 3.12, torch 2.11 and CUDA $cuda; give another wheel, or build it"
fi
install "$venv" --no-build-isolation -e .

"$venv/bin/verl-multiturn" doctor
echo "install_gpu: done. source $venv/bin/activate, and on a machine with a GPU: verl-multiturn doctor --gpu" >&2
[ "$flash_attn" != none ] || echo "install_gpu: without flash-attn, start recipes with --variant without_flash_attn" >&2
