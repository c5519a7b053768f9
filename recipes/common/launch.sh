# shellcheck shell=bash
# What all recipes share. A run.sh sets `tools` and `flags`, sources this file, and calls `launch "$@"`:
#
#   bash recipes/NAME/run.sh [--smoke] [--variant NAME]... [--data SOURCE] [--out DIR] [--print|--prepare] [any.verl.override=value ...]
#
#   --smoke     the same run with a tiny model and small made data, on a CPU, in a few minutes
#   --variant   flags from recipes/NAME/variants/*.flags or recipes/common/variants/*.flags
#   --data      a local file or a hub name in the place of the recipe's own data
#   --out       where everything is written; outputs/NAME by default
#   --print     print the trainer's flags, one per line, and start nothing
#   --prepare   write the data and stop
#
# Later flags win: base.flags, the recipe's, those of variants, smoke.flags (the shared and the recipe's), the command line.
# The trainer is `python -m verl.trainer.main_ppo`, with $PYTHON or `python`; `--smoke` in a checkout makes .venv and uses it.

recipe_dir="$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)"
recipe="$(basename "$recipe_dir")"
base_dir="$recipe_dir" # another one's for a recipe that begins from it
common_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$common_dir/../.." && pwd)"

# Begins from another recipe: takes over its `tools`, `flags`, smoke.flags, variants and prepare_data.py, for a run.sh that
# adds to them.
on_top_of() {
    local own_dir="$recipe_dir"
    taking_over=1
    # shellcheck source=/dev/null
    source "$root/recipes/$1/run.sh" # sources this file again, and leaves its own folder in base_dir
    taking_over=""
    recipe_dir="$own_dir"
    recipe="$(basename "$own_dir")"
}

# Adds the lines of a .flags file to `given`, and those that begin with `prepare_data.py` to `prepare`. `!PREFIX` takes away
# what was given so far of the keys that begin so, for a configuration that does not have them; `?KEY=VALUE` counts unless
# the key was given as null.
read_flags() {
    local line word words
    while IFS= read -r line || [ -n "$line" ]; do
        line="${line%%#*}"
        line="${line#"${line%%[![:space:]]*}"}"
        line="${line%"${line##*[![:space:]]}"}"
        case "$line" in
            "") ;;
            "!"*) drop_flags "${line#!}" ;;
            "prepare_data.py "*)
                read -r -a words <<<"${line#prepare_data.py }"
                for word in "${words[@]}"; do prepare+=("$(with_folders "$word")"); done
                ;;
            "?"*)
                line="${line#\?}"
                [ "$(last_of "${line%%=*}" "${given[@]}")" = null ] || given+=("$(with_folders "$line")")
                ;;
            *) given+=("$(with_folders "$line")") ;;
        esac
    done <"$1"
}

# A text with the folders that a .flags file may name.
with_folders() {
    local text="${1//'$root'/"$root"}"
    text="${text//'$recipe'/"$recipe_dir"}"
    printf '%s' "${text//'$out'/"$out"}"
}

drop_flags() {
    local flag kept=()
    for flag in "${given[@]}"; do
        [[ "${flag#++}" == "$1"* ]] || kept+=("$flag")
    done
    given=("${kept[@]}")
}

# The value of a key in flags, with or without `+` before it: the last one counts.
last_of() {
    local key="$1" flag value=""
    shift
    for flag in "$@"; do
        flag="${flag#+}" && flag="${flag#+}"
        [ "${flag%%=*}" != "$key" ] || value="${flag#*=}"
    done
    printf '%s' "$value"
}

usage() {
    echo "$recipe: $1" >&2
    sed -n 's/^# \{0,1\}//; 4,12p' "$common_dir/launch.sh" >&2
    exit 2
}

# Reads the command line into `smoke`, `only`, `data`, `out`, `variants` and `own`, and sets in `places` where a trainer of
# verl reads and writes.
read_options() {
    local variant suffix=""
    while [ $# -gt 0 ]; do
        case "$1" in
            --smoke) smoke=1 ;;
            --print | --prepare) only="$1" ;;
            --variant | --data | --out)
                [ $# -gt 1 ] || usage "$1 needs a value"
                case "$1" in
                    --variant) variants+=("$2") ;;
                    --data) data="$2" ;;
                    --out) out="$2" ;;
                esac
                shift
                ;;
            -h | --help) usage "how it is run:" ;;
            --*) usage "unknown argument '$1'; an override has the form key=value" ;;
            *=* | "~"*) own+=("$1") ;;
            *) usage "unknown argument '$1'; an override has the form key=value" ;;
        esac
        shift
    done
    [ -z "$smoke" ] || [ -z "$data" ] || usage "--smoke makes its own data; leave --data out"
    for variant in "${variants[@]}"; do suffix+="-$variant"; done
    out="$(realpath -m "${out:-$root/outputs/$recipe$suffix${smoke:+-smoke}}")"
    local LC_ALL=C
    [[ "$root$out" != *[^A-Za-z0-9_/+.%*@?:\ -]* ]] ||
        usage "Hydra reads no folder named like '$root' or '$out'; expected letters of ASCII, digits, blanks and any of _ / + . % * @ ? : -"
    places=(
        hydra.run.dir="$out/hydra"
        data.train_files="$out/data/train.parquet"
        data.val_files="$out/data/test.parquet"
        trainer.project_name=verl_multiturn
        trainer.experiment_name="$recipe$suffix"
        trainer.default_local_dir="$out/checkpoints"
    )
}

# Adds the flags of the chosen variants to `given`; each comes from the first folder that has it.
read_variants() {
    local variant folder
    for variant in "${variants[@]}"; do
        for folder in "$@" ""; do
            [ -n "$folder" ] || usage "unknown variant '$variant'; known are $(known_variants "$@")"
            [ ! -f "$folder/$variant.flags" ] || break
        done
        read_flags "$folder/$variant.flags"
    done
}

known_variants() {
    local folder file names=()
    for folder in "$@"; do
        for file in "$folder"/*.flags; do
            [ ! -f "$file" ] || names+=("$(basename "$file" .flags)")
        done
    done
    printf '%s\n' "${names[@]}" | sort -u | paste -sd ' '
}

# Chooses `python`; a run on a CPU in a checkout makes .venv and uses it.
choose_python() {
    python="${PYTHON:-python}"
    [ -n "$smoke$on_cpu" ] || return 0
    export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
    if [ -z "${PYTHON:-}" ] && [ -f "$root/scripts/environment.sh" ]; then
        bash "$root/scripts/environment.sh"
        python="$root/.venv/bin/python"
    fi
}

# Runs a script that writes the data. Rows that are there are used as they are, unless a variant asked for other ones when
# they were made.
write_data() {
    local made="$out/data/.prepared" wanted="${smoke:+--smoke }${prepare[*]}"
    mkdir -p "$out"
    if [ -n "$smoke$data" ] || [ ! -f "$out/data/train.parquet" ] || { [ -f "$made" ] && [ "$(cat "$made")" != "$wanted" ]; }; then
        "$python" "$1" --out "$out/data" ${smoke:+--smoke} ${tools:+--tools "$tools"} "${prepare[@]}" ${data:+--source "$data"}
        echo "$wanted" >"$made"
    fi
}

# The file for this start's metrics: verl's logger empties the one that it is given, and a resumed run keeps those of its
# earlier starts (verl_multiturn/observe/metric_files.py reads all).
next_metrics() {
    local file="$out/metrics.jsonl" start=1
    while [ -s "$file" ]; do
        start=$((start + 1))
        file="$out/metrics.$start.jsonl"
    done
    printf '%s' "$file"
}

launch() {
    [ -z "${taking_over:-}" ] || return 0
    local smoke="" only="" data="" out="" variants=() own=() places=() given=() prepare=() python
    read_options "$@"
    read_flags "$common_dir/base.flags"
    given+=("${flags[@]//'$out'/"$out"}")
    read_variants {"$recipe_dir","$base_dir","$common_dir"}/variants
    if [ -n "$smoke" ]; then
        read_flags "$common_dir/smoke.flags"
        [ ! -f "$base_dir/smoke.flags" ] || read_flags "$base_dir/smoke.flags"
        [ "$base_dir" = "$recipe_dir" ] || [ ! -f "$recipe_dir/smoke.flags" ] || read_flags "$recipe_dir/smoke.flags"
    fi
    local command=(
        "${places[@]}"
        actor_rollout_ref.rollout.multi_turn.tool_config_path="${tools:-null}"
        "${given[@]}"
        "${own[@]}"
    )
    if [ "$only" = --print ]; then
        printf '%s\n' "${command[@]}"
        return
    fi

    choose_python
    write_data "$base_dir/prepare_data.py"
    [ "$only" != --prepare ] || return 0
    # A run of minutes begins anew, unless it has a checkpoint from which verl resumes.
    [ -z "$smoke$on_cpu" ] || [ -f "$out/checkpoints/latest_checkpointed_iteration.txt" ] ||
        rm -rf "$out"/metrics*.jsonl "$out/records" "$out/validation"
    VERL_FILE_LOGGER_PATH="$(next_metrics)"
    export VERL_FILE_LOGGER_PATH
    [ -z "$smoke" ] || export RAY_ADDRESS=local # never a cluster that is there
    "$python" -m verl.trainer.main_ppo "${command[@]}"
    local report="$common_dir/report.py"
    [ ! -f "$base_dir/report.py" ] || report="$base_dir/report.py"
    [ ! -f "$out/metrics.jsonl" ] || "$python" "$report" "$out" # no file logger, no report
}

on_cpu="${on_cpu:-}" # set by a recipe whose full run is one on a CPU
