#!/bin/sh
# Installs PostgreSQL's server with apt when this machine has none. The tests start servers of their own from it.
set -eu
if ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1; then
    exit 0
fi
# The package would start a cluster of its own, which nobody here wants.
if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo"; fi
    $as_root mkdir -p /etc/postgresql-common
    echo "create_main_cluster = false" | $as_root tee /etc/postgresql-common/createcluster.conf >/dev/null
fi
sh "$(dirname "$0")/apt_install.sh" initdb postgresql
