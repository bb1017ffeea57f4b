"""A PostgreSQL server for the tests: its own data folder, its own port, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INSTALLER = Path(__file__).parents[1] / "ensure_postgres.sh"
PASSWORD = "s3cret%/@pass"
QUOTED_PASSWORD = "s3cret%25%2F%40pass"


def binaries() -> Path:
    """The folder of `initdb` and `pg_ctl`; installs PostgreSQL when it is missing."""
    subprocess.run([str(INSTALLER)], check=True, timeout=600)
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name))
    found = shutil.which("initdb")
    return versions[-1] if versions else Path(str(found)).parent


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of the server (user and password included) without a database name: append one."""
    tools = binaries()
    folder = Path(tempfile.mkdtemp(prefix="trace-postgres-"))
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    # PostgreSQL refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        entry = pwd.getpwnam(user)
        for path in (folder, password_file):
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def run(command: str) -> None:
        argv = ["bash", "-c", command] if user is None else ["su", "-s", "/bin/bash", user, "-c", command]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        log = folder / "log"
        assert done.returncode == 0, f"{command}: {done.stderr} {log.read_text()[-2000:] if log.exists() else ''}"

    data, port = folder / "data", free_port()
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=60"
    try:
        run(
            f"{tools}/initdb -D {data} -U trace --pwfile={password_file} -A scram-sha-256 -E UTF8 --locale=C >/dev/null"
        )
        # The server must not hold this process's pipes, or the call above would wait for it forever.
        run(f"{tools}/pg_ctl -D {data} -o '{options}' -l {folder}/log -w start >/dev/null 2>&1 </dev/null")
        yield f"postgresql://trace:{QUOTED_PASSWORD}@127.0.0.1:{port}"
    finally:
        if (data / "postmaster.pid").exists():
            run(f"{tools}/pg_ctl -D {data} -m immediate -w stop >/dev/null 2>&1 </dev/null")
        shutil.rmtree(folder)
