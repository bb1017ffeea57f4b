#!/bin/sh
# What the entrypoint of the postgres image does with the variables that compose.yaml gives it. Begins as root.
set -eu
if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA" /var/run/postgresql
    chown postgres:postgres "$PGDATA" /var/run/postgresql
    chmod 700 "$PGDATA"
    exec setpriv --reuid=postgres --regid=postgres --clear-groups sh "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    password=$(mktemp)
    printf '%s\n' "$POSTGRES_PASSWORD" > "$password"
    initdb --pgdata "$PGDATA" --username "$POSTGRES_USER" --pwfile "$password" --auth-local trust \
        --auth-host scram-sha-256 --encoding UTF8 --locale C
    rm "$password"
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    pg_ctl --pgdata "$PGDATA" --wait --options "-c listen_addresses=''" start
    createdb --username "$POSTGRES_USER" "$POSTGRES_DB"
    for script in /docker-entrypoint-initdb.d/*.sh; do sh "$script"; done
    pg_ctl --pgdata "$PGDATA" --wait --mode fast stop
fi
exec postgres -D "$PGDATA" -c "listen_addresses=*"
