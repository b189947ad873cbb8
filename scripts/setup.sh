#!/usr/bin/env bash
# Create .venv and install the course into it, from `make`:  scripts/setup.sh ".[lab]" | ".[test]"
# Before every use, check whose .venv it is:                 scripts/setup.sh whose
# PYTHON is the Python that creates .venv. CPU=1 installs PyTorch's CPU wheels, a tenth of the size of the GPU wheels.
# TORCH=2.11.0 installs that version of PyTorch instead of the pinned one.
# An error is one line on stderr that says what to do. If this run created .venv, it is removed after an error; an
# existing one is unchanged, since pip downloads everything before it changes anything.
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
    begun=$VENV
    echo "Making $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV" >"$log" 2>&1 && return
    # Debian and Ubuntu ship Python without this part of the standard library.
    if grep -q ensurepip "$log"; then
        stop "this Python cannot make environments: run 'sudo apt install ${PYTHON##*/}-venv', then the same command again"
    fi
    stop "$PYTHON -m venv failed: $(tail -n 1 "$log")"
}

pip() { "$VENV/bin/python" -m pip "$@"; }

configured() {  # $1: an option. What PIP_... or pip's files set it to; uv does not read them
    pip config list 2>/dev/null | sed -nE "s/^(:env:|global|install)\\.$1='(.*)'\$/\\2/p" | head -n 1 | sed 's/\\n/ /g'
}

install() {  # $1: the requirement
    local pins=constraints.txt cpu="" links
    if [ -n "${TORCH:-}" ]; then  # 2.11 with the Triton that its GPU wheels require; 3.6's interpreter fails with NumPy 2.4
        pins=$log.pins
        grep -vE "^(torch|torchao|triton|numpy|setuptools)==" constraints.txt >"$pins"
        printf "torch==%s\nnumpy<2.4\n" "$TORCH" >>"$pins"
        case $TORCH in 2.11 | 2.11.*) echo "triton==3.6.*" >>"$pins" ;; esac
    fi
    [ "${CPU:-}" != 1 ] || cpu=https://download.pytorch.org/whl/cpu
    # uv installs the same versions in a fraction of the time. Where it is missing or fails, pip does, or says why it cannot.
    if PIP_RETRIES=1 pip install -q --only-binary :all: -c constraints.txt uv >/dev/null 2>&1; then
        links=$(configured find-links)
        UV_DEFAULT_INDEX=$(configured index-url) UV_INDEX="$(configured extra-index-url) $cpu" UV_FIND_LINKS=${links// /,} \
            UV_INDEX_STRATEGY=unsafe-best-match \
            "$VENV/bin/python" -m uv pip install --python "$VENV/bin/python" -c "$pins" -e "$1" && return
    fi
    pip install -c "$pins" -e "$1" ${cpu:+--extra-index-url "$cpu"}
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
echo "Installing into $VENV: some minutes the first time, some seconds later"
progress='/^ *(Resolved|Building|Prepared|Collecting|Downloading|Installing collected) / {print substr($0, 1, 100); fflush()}'
if install "$1" 2>&1 | tee "$log" | awk "$progress"; then
    begun=""
    echo "Installed, $SECONDS s after the start"
elif grep -qE "Retrying|Max retries exceeded|from versions: none|name resolution|timed out" "$log"; then
    stop "pip cannot reach its package index: check the network (or HTTPS_PROXY, or PIP_INDEX_URL), then run the same command again"
else
    cat "$log" >&2
    stop "pip failed, see above"
fi
