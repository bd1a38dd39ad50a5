# Sourced by scripts/probe and scripts/test: makes a virtual environment that holds this package, from nothing but
# Python 3.10 or newer. Sets VENV. An environment that exists is used as it is.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$here/.venv}

# A virtual environment of its own, outside of any other.
make_environment() {
    [ -x "$VENV/bin/python" ] && return 0
    local python
    for python in ${PYTHON:-python3.12 python3.11 python3.13 python3.10 python3}; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
        python=
    done
    if [ -z "$python" ]; then
        echo "prefill-probe needs Python 3.10 or newer; set PYTHON to one" >&2
        return 69
    fi
    "$python" -m venv "$VENV" || { echo "could not make a virtual environment in $VENV (Debian: python3-venv)" >&2; return 69; }
}

# Whether this machine has a CUDA GPU that answers.
has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1
}

# pip, quiet but for errors.
pip_install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
