#!/usr/bin/env bash
# Create .venv and install the course into it, from `make`:  scripts/setup.sh ".[lab]" | ".[test]"
# Before every use, check whose .venv it is:                 scripts/setup.sh whose
# PYTHON is the Python that creates .venv. CPU=1 installs PyTorch's CPU wheels, a tenth of the size of the GPU wheels.
# TORCH=2.11.0 installs that version of PyTorch instead of the pinned one.
# An error is one line on stderr that says what to do. If this run created .venv, it is removed after an error; an
# existing one is unchanged unless the disk fills up meanwhile, since uv and pip download everything first.
set -u -o pipefail
export PIP_RETRIES=${PIP_RETRIES:-3}  # with pip's default of 5, it takes half a minute to notice that there is no network
export PYTHONUNBUFFERED=1  # print pip's lines as they are written, not in blocks
PYTHON=${PYTHON:-python3}
VENV=.venv
log=$(mktemp) && begun="" && trap 'rm -rf "$log" "$log.pins" $begun' EXIT && trap 'exit 130' INT TERM

stop() {
    echo "setup: $1" >&2
    exit 1
}

check_version() {  # $1: a Python
    local version
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        stop "$1 does not run: install Python 3.11, 3.12 or 3.13, and name it where it is not python3: make lab PYTHON=python3.12"
    case $version in
        3.11 | 3.12 | 3.13) ;;
        *) stop "$1 is Python $version, the course needs 3.11, 3.12 or 3.13: install one and name it: make lab PYTHON=python3.12" ;;
    esac
}

make_venv() {
    check_version "$PYTHON"
    rm -rf "$VENV"
    [ -n "$begun" ] || begun="$VENV $([ -e llm_training_at_scale.egg-info ] || echo llm_training_at_scale.egg-info)"
    echo "Making $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV" >"$log" 2>&1 && return
    # Debian and Ubuntu ship Python without this part of the standard library.
    "$PYTHON" -c "import ensurepip" >/dev/null 2>&1 ||
        stop "this Python cannot make environments: run 'sudo apt install ${PYTHON##*/}-venv', then the same command again"
    stop_if_disk_is_full 200
    stop "$PYTHON -m venv failed: $(tail -n 1 "$log")"
}

stop_if_disk_is_full() {  # $1: how many free MB on this folder's disk are taken for full; or a message has said it
    local free
    free=$(df -Pk . 2>/dev/null | awk 'NR == 2 {print int($4 / 1024)}')
    if [ "${free:-999999}" -lt "$1" ] || grep -qE "No space left|os error 28|quota exceeded" "$log"; then
        stop "the disk is full: the environment and the downloads in ~/.cache take up to 10 GB (a fifth with CPU=1), and this folder's disk has $free MB"
    fi
}

pip() { "$VENV/bin/python" -m pip "$@"; }

configured() {  # $1: an option. What PIP_... or pip's files set it to
    local section
    for section in :env: install global; do
        pip config list 2>/dev/null | sed -nE "s/^$section\\.$1=['\"](.*)['\"]\$/\\1/p" | sed 's/\\n/ /g' | grep . && return
    done
}

give() {  # $1: a variable; $2: an option of pip's, which uv knows by that variable alone
    local value
    value=$(configured "$2") && export "$1=$value"
}

by_uv() (  # $1: the requirement. The same versions in a fraction of pip's time
    PIP_RETRIES=1 pip install -q --timeout 5 --only-binary :all: -c constraints.txt uv >/dev/null 2>&1 || exit
    give UV_DEFAULT_INDEX index-url
    give UV_INDEX extra-index-url
    give UV_FIND_LINKS find-links
    give UV_NO_INDEX no-index
    give UV_INSECURE_HOST trusted-host
    give HTTPS_PROXY proxy
    give SSL_CERT_FILE cert
    export UV_INDEX="${UV_INDEX:-} $cpu_index" UV_FIND_LINKS=${UV_FIND_LINKS:-} UV_INDEX_STRATEGY=unsafe-best-match
    UV_FIND_LINKS=${UV_FIND_LINKS// /,}
    set -- -c "$pins" -e "$1"
    for file in $(configured constraint); do set -- "$@" -c "$file"; done
    "$VENV/bin/python" -m uv pip install --python "$VENV/bin/python" "$@"
)

by_pip() { pip install -c "$pins" -e "$1" ${cpu_index:+--extra-index-url "$cpu_index"}; }

shown() {  # run a command; all of what it prints goes to $log, its progress to the terminal
    local line
    "$@" 2>&1 | tee "$log" | while IFS= read -r line; do  # not awk: Debian's waits until it has read 4 KB
        case $line in
            *Resolved\ * | *Building\ * | *Prepared\ * | Collecting\ * | *Downloading\ * | Installing\ collected*) printf '%.100s\n' "$line" ;;
        esac
    done
}

# pip installs the course by its folder. If two clones shared an environment, the second clone's setup would make the
# first clone's notebooks import the second clone's library.
if [ "$1" = whose ]; then
    for place in "$VENV"/lib/python3*/site-packages/__editable__.llm_training_at_scale-*.pth; do
        [ -e "$place" ] || continue
        owner=$(head -n 1 "$place")
        [ "$owner" -ef . ] ||
            stop ".venv belongs to the clone in $owner, and this is $(pwd -P): 'rm -rf .venv' here (of a link, the link alone goes), and run it again"
    done
    [ -x "$VENV/bin/python" ] || [ ! -e "$VENV/installed-lab" ] ||
        stop "the Python of .venv is gone, or has another path now: 'rm -rf .venv', and run it again"
    exit
fi
# Recreate an environment whose Python was removed, or whose setup was killed before it had pip.
if pip --version >/dev/null 2>&1; then
    check_version "$VENV/bin/python"
else
    make_venv
fi
pins=constraints.txt cpu_index=""
[ "${CPU:-}" != 1 ] || cpu_index=https://download.pytorch.org/whl/cpu
if [ -n "${TORCH:-}" ]; then  # 2.11 with the Triton that its GPU wheels require; 3.6's interpreter fails with NumPy 2.4
    pins=$log.pins
    grep -vE "^(torch|torchao|triton|numpy|setuptools)==" constraints.txt >"$pins"
    printf "torch==%s\nnumpy<2.4\n" "$TORCH" >>"$pins"
    case $TORCH in 2.11 | 2.11.*) echo "triton==3.6.*" >>"$pins" ;; esac
fi
echo "Installing into $VENV: some minutes the first time, some seconds later"
if ! shown by_uv "$1"; then
    stop_if_disk_is_full 0
    # What uv has begun, pip would take for installed.
    if [ -n "$begun" ] && "$VENV/bin/python" -c "import uv" 2>/dev/null; then make_venv; fi
    echo "uv is unavailable or failed; installing with pip, which takes longer"
    if ! shown by_pip "$1"; then
        stop_if_disk_is_full 200
        grep -qE "Retrying|Max retries exceeded|from versions: none|name resolution|timed out" "$log" &&
            stop "pip cannot reach its package index: check the network (or HTTPS_PROXY, or PIP_INDEX_URL), then run the same command again"
        cat "$log" >&2
        stop "pip failed, see above"
    fi
fi
begun=""
echo "Installed, $SECONDS s after the start"
