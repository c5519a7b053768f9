#!/usr/bin/env bash
# Compares training with common prefixes computed once with verl's engine, in bf16 on one GPU. Neither SGLang nor Ray is
# started. Is it exact within the noise of bf16, and what does it save? Some minutes; the last line is one JSON object.
#   bash scripts/gpu_prefix_tree.sh [--wheels DIR] [--small]
#   --wheels DIR   wheels of verl, tensordict and others that $PYTHON lacks, for a machine without a network
#   --small        a tiny model and short rows: with VERL_PLATFORM=cpu it tries the script on a CPU
# Needs a Python ($PYTHON, or python3) with PyTorch and transformers.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels="" small=""
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels)
            [ $# -gt 1 ] && [ -d "$2" ] || { echo "gpu_prefix_tree: --wheels needs a folder" >&2 && exit 2; }
            wheels="$2" && shift
            ;;
        --small) small=--small ;;
        *) echo "gpu_prefix_tree: unknown argument '$1'; expected --wheels DIR or --small" >&2 && exit 2 ;;
    esac
    shift
done
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD" VERL_PLATFORM="${VERL_PLATFORM:-nvidia}"
if [ -n "$wheels" ]; then
    target="$(mktemp -d)"
    trap 'rm -rf "$target"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --target "$target" "$wheels"/*.whl
    PYTHONPATH="$target:$PWD"
fi
"$python" -m benchmarks.prefix_tree_gpu $small
