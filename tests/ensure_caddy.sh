#!/bin/sh
# Installs Caddy with apt when this machine has none: the door of the compose stack is tested with it.
set -eu
if command -v caddy >/dev/null 2>&1; then
    exit 0
fi
sh "$(dirname "$0")/apt_install.sh" caddy caddy
# The package starts a server of its own, which nobody here wants.
if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo"; fi
if command -v systemctl >/dev/null 2>&1; then $as_root systemctl disable --now caddy >/dev/null 2>&1 || true; fi
