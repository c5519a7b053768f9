#!/usr/bin/env bash
# The quickstart's model is trained within an agent that knows nothing of it, see README.md; the settings are in config.yaml.
#   bash recipes/proxy_quickstart/run.sh [--branches [--credit session|discounted|completion]] [--smoke] [--seed N]
#       [--steps N] [--out DIR] [any.verl.override=value ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
on_cpu=1
source "$here/../common/python.sh"
words=()
while (($#)); do
    case "$1" in
        --branches) words+=(--variant branches) ;;
        --credit)
            [[ "${2:-}" == session ]] || words+=(--variant "${2:?--credit needs session, discounted or completion}")
            shift
            ;;
        *) words+=("$1") ;;
    esac
    shift
done
exec "$python" -m verl_multiturn.cli run "$here" ${words[@]+"${words[@]}"}
