#!/bin/sh
# Installs Caddy with apt when this machine has none: the door of the compose stack is tested with it.
set -eu
if command -v caddy >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo"; fi
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends caddy
