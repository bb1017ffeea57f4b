#!/bin/sh
# Installs Chromium with apt when this machine has no browser: the gateway's page is tested in one.
set -eu
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
sh "$(dirname "$0")/apt_install.sh" chromium chromium fonts-dejavu-core
