# Sourced by the scripts that make an environment, in the folder above this one. Defines `install NAME DIR [OPTION ...]`,
# which is verl_multiturn/install.py under any Python that there is; $PYTHON is the one that makes the environment.
install() {
    local each
    for each in "${PYTHON:-}" python3.11 python3.12 python3 python; do
        if [ -n "$each" ] && "$each" -c 'import sys; sys.exit(sys.version_info < (3, 7))' 2>/dev/null; then
            "$each" verl_multiturn/install.py "$@" ${PYTHON:+--python "$PYTHON"}
            return
        fi
    done
    echo "install: Python is needed, and none is found; install it, or name it with PYTHON=/path/to/python" >&2
    return 1
}
