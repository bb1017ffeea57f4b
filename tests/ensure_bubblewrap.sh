#!/bin/sh
# Installs bubblewrap with apt when this machine has none, and says so when it cannot make namespaces here: the sandbox
# of generated code needs both.
set -eu
command -v bwrap >/dev/null 2>&1 || sh "$(dirname "$0")/apt_install.sh" bwrap bubblewrap
if ! problem=$(bwrap --unshare-user --unshare-pid --unshare-net --ro-bind / / true 2>&1); then
    echo "warning: bubblewrap cannot make namespaces here ($problem); tests of the sandbox will fail." >&2
    echo "  Ubuntu 24.04: sysctl kernel.apparmor_restrict_unprivileged_userns=0; Docker: see docs/3-platform.md" >&2
fi
