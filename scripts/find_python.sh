#!/usr/bin/env bash
# Prints the path of a Python 3.12 that can make virtual environments; otherwise one line, exit 2.
#
# Looks on PATH, then under pyenv (on PATH or not), then asks uv, which may download one. Every
# candidate is run before it is believed: pyenv's shims exist for versions that are not selected,
# and Debian's python3.12 comes without ensurepip unless python3.12-venv is installed.
set -euo pipefail

probe='import ensurepip, sys, venv
assert sys.version_info[:2] == (3, 12)
print(sys.executable)'

no_venv=""
try() {
    local found
    if found=$("$1" -c "$probe" 2>/dev/null) && [ -n "$found" ]; then
        printf '%s\n' "$found"
        exit 0
    fi
    if "$1" -c 'import sys; assert sys.version_info[:2] == (3, 12)' 2>/dev/null; then
        no_venv=$1
    fi
}

for name in python3.12 python3 python; do
    if command -v "$name" >/dev/null; then try "$name"; fi
done

roots=("${PYENV_ROOT:-$HOME/.pyenv}")
if command -v pyenv >/dev/null; then roots+=("$(pyenv root)"); fi
for root in "${roots[@]}"; do
    for candidate in "$root"/versions/3.12*/bin/python3.12; do
        if [ -x "$candidate" ]; then try "$candidate"; fi
    done
done

# `uv --version` first: pyenv also makes shims of uv that do not run.
for uv in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
    if "$uv" --version >/dev/null 2>&1; then
        if ! found=$("$uv" python find 3.12 2>/dev/null); then
            "$uv" python install 3.12 >&2 && found=$("$uv" python find 3.12) || found=""
        fi
        if [ -n "$found" ]; then try "$found"; fi
        break
    fi
done

if [ -n "$no_venv" ]; then
    echo "error: $no_venv has no venv or ensurepip module; apt-get install python3.12-venv" >&2
else
    echo "error: no Python 3.12 on PATH, under pyenv or through uv; install one and try again" >&2
fi
exit 2
