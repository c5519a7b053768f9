# Sourced by the scripts that make an environment, in the folder above this one. Defines `install VENV ARGUMENT ...`, which is `uv pip install` without
# dependencies: the locks are complete, and cannot be resolved, since SGLang's own pins contradict verl's.
install() {
    local venv="$1" index
    shift
    # pip puts uv there, pinned; it takes a second. uv then takes a tenth of pip's time for the rest.
    [ -x "$venv/bin/uv" ] ||
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/uv.lock
    # uv does not read pip's settings, so an index that pip was told of is handed on. Like pip, it is to trust the
    # certificates that this machine trusts.
    index="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)}}"
    # uv says what it downloads. The list of all that it installed is left out.
    env ${index:+"UV_DEFAULT_INDEX=$index"} UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-120}" \
        "$venv/bin/uv" pip install --system-certs --no-deps --python "$venv/bin/python" "$@" \
        2> >(grep --line-buffered -vE '^ [-+~] |^(Using|Audited|Resolved) ' >&2)
}
# `install_extras VENV NAME ...` installs requirements/NAME.lock for each NAME, unless VENV has what stands there.
install_extras() {
    local venv="$1" extra
    shift
    for extra in "$@"; do
        if ! cmp -s "requirements/$extra.lock" "$venv/.$extra"; then
            install "$venv" -r "requirements/$extra.lock"
            cp "requirements/$extra.lock" "$venv/.$extra"
        fi
    done
}
