#!/bin/sh
# Installs bubblewrap with apt when this machine has none, and says so when it cannot make namespaces here: the sandbox
# of generated code needs both.
set -eu
if ! command -v bwrap >/dev/null 2>&1; then
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "error: bubblewrap (bwrap) is missing and there is no apt-get; install it with this system's package manager" >&2
        exit 1
    fi
    as_root=""
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null 2>&1 || { echo "error: bubblewrap is missing; as root: apt-get install bubblewrap" >&2; exit 1; }
        as_root="sudo"
    fi
    # A fresh machine may have no package lists yet, and its own updates may hold apt's lock.
    $as_root apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 \
        install -y -qq --no-install-recommends bubblewrap >/dev/null
fi
if ! problem=$(bwrap --unshare-user --unshare-pid --unshare-net --ro-bind / / true 2>&1); then
    echo "warning: bubblewrap cannot make namespaces here ($problem); tests of the sandbox will fail." >&2
    echo "  Ubuntu 24.04: sysctl kernel.apparmor_restrict_unprivileged_userns=0; Docker: see docs/3-platform.md" >&2
fi
