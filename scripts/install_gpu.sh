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

fail() {
    echo "install_gpu: $1" >&2
    exit 2
}

root="$(cd "$(dirname "$0")/.." && pwd)"
venv="$root/.venv-gpu" options=(--repair)
while [ $# -gt 0 ]; do
    case "$1" in
        --flash-attn | --venv)
            [ $# -gt 1 ] || fail "$1 needs a value"
            if [ "$1" = --venv ]; then
                venv="$(realpath -m "$2")"
            elif [[ "$2" != *://* ]]; then
                options+=("$1" "$(realpath -m "$2")")
            else
                options+=("$1" "$2")
            fi
            shift
            ;;
        --without-flash-attn) options+=("$1") ;;
        -h | --help) sed -n 's/^# \{0,1\}//; 2,11p' "$0" && exit ;;
        *) fail "unknown argument '$1'; expected --flash-attn WHEEL, --without-flash-attn or --venv DIR" ;;
    esac
    shift
done
cd "$root"
source scripts/install.sh
install gpu "$venv" "${options[@]}"
"$venv/bin/verl-multiturn" doctor
echo "install_gpu: done. source $venv/bin/activate, and on a machine with a GPU: verl-multiturn doctor --gpu" >&2
