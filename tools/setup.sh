#!/bin/sh
# Make .venv and install the pinned requirements: sh tools/setup.sh VENV
#
# Needs a Python that can make a virtual environment. On Debian, as root, the
# packages that are missing for it are installed; otherwise they are named.
set -eu

venv=$1
packages="python3-venv libnuma1"

usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
        >/dev/null 2>&1
}

find_python() {
    for name in python3.11 python3.12 python3.13 python3; do
        if command -v "$name" >/dev/null && usable "$name"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

has_system_packages() {
    find_python >/dev/null && ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1'
}

# ldconfig is not on every user's PATH.
PATH=$PATH:/usr/sbin:/sbin

if ! has_system_packages; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
    elif ! find_python >/dev/null; then
        echo "setup: needs Python 3.11 to 3.13 with venv; as root: apt-get install $packages" >&2
        exit 2
    else
        echo "setup: libnuma is missing, which some transfer backends load: apt-get install libnuma1" >&2
    fi
fi

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python) || {
        echo "setup: found no Python 3.11 to 3.13 that can make a virtual environment" >&2
        exit 2
    }
    "$python" -m venv "$venv"
fi

"$venv/bin/python" -m pip install --quiet -r requirements.txt -r requirements-test.txt
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements-nodeps.txt
