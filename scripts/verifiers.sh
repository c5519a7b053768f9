#!/usr/bin/env bash
# Makes .venv-verifiers, in which verifiers plays its environments (requirements/verifiers.lock, Python 3.11), and tries the
# bridge to it: the same rewards as verifiers' own evaluation, seats that are not trained, killed processes.
#   bash scripts/verifiers.sh [NAME ...]     names as in scripts/verifiers/__main__.py; all of them by default
#   bash scripts/verifiers.sh --install      only makes the environment, and gets TextArena's word lists
#   bash scripts/verifiers.sh --words        only gets the word lists, into .venv-verifiers/nltk_data
# Python 3.11 is $PYTHON311, or one that is found on the PATH, or in pyenv's or uv's folder. The last line is one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
source scripts/install.sh
PYTHON="${PYTHON311:-}" install verifiers .venv-verifiers --anew
words() {
    local each folder=.venv-verifiers/nltk_data
    for each in words averaged_perceptron_tagger_eng; do
        compgen -G "$folder/*/$each*" >/dev/null && continue
        # It ends well without a network, too.
        timeout 120 .venv-verifiers/bin/python -m nltk.downloader -q -d "$folder" "$each" >/dev/null 2>&1 || true
        if ! compgen -G "$folder/*/$each*" >/dev/null; then
            echo "verifiers: the word list '$each' cannot be fetched, so TextArena's games are refused; run this again" \
                "where there is a network, or copy it to $folder" >&2
        fi
    done
}
case "$*" in
--install | --words) words && exit 0 ;;
esac
exec .venv/bin/python -m scripts.verifiers "$@"
