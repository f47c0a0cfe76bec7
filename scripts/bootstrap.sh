#!/usr/bin/env bash
# Makes or updates .venv from requirements.lock and installs this project into it, editable.
#
# Promise: the stamp file given as $1 exists only when everything is installed. A half-installed
# environment is never repaired, because pip takes a half-unpacked package for an installed one:
# without the stamp it is made anew.
set -euo pipefail

stamp=$1
venv=$(dirname "$stamp")

# A virtual environment that happens to be active must not decide what is installed where.
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH

if [ -e "$stamp" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    rm -f "$stamp"
else
    python=$(bash scripts/find_python.sh)
    echo "making $venv with $python"
    "$python" -m venv --clear "$venv"
fi

# Errors only: pip's warnings about package indexes would bury them on some machines.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" --quiet --quiet; }

echo "installing requirements.lock (torch alone is several GB: about two minutes)"
pip install --require-hashes -r requirements.lock
# The lock holds the build requirements too, so nothing is resolved or downloaded here.
pip install --no-deps --no-build-isolation --editable .
touch "$stamp"
