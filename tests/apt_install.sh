#!/bin/sh
# apt_install.sh COMMAND PACKAGE...: installs packages with apt, because COMMAND is missing; one clear error where it cannot.
set -eu
missing=$1
shift
if ! command -v apt-get >/dev/null 2>&1; then
    echo "error: $missing is missing and there is no apt-get; install it with this system's package manager ($*)" >&2
    exit 1
fi
as_root=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null 2>&1 || { echo "error: $missing is missing; as root: apt-get install $*" >&2; exit 1; }
    as_root="sudo"
fi
# A fresh machine may have no package lists yet, and its own updates may hold apt's lock.
$as_root apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 \
    install -y -qq --no-install-recommends "$@" >/dev/null
