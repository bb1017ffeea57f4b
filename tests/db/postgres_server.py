"""A PostgreSQL server for the tests: its own data folder, its own port, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

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
    data, log, port = folder / "data", folder / "log", free_port()
    # The server ends with this process, even when that is killed.
    prefix = ["setpriv", "--pdeathsig", "INT"]
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root.
        prefix += ["--reuid", "postgres", "--regid", "postgres", "--init-groups"]
        entry = pwd.getpwnam("postgres")
        for path in (folder, password_file):
            os.chown(path, entry.pw_uid, entry.pw_gid)
    init = f"-D {data} -U trace --pwfile={password_file} -A scram-sha-256 -E UTF8 --locale=C --no-sync".split()
    settings = ("listen_addresses=127.0.0.1", "fsync=off", "max_connections=60")
    options = ["-D", str(data), "-p", str(port), "-k", str(folder), *(f"-c{setting}" for setting in settings)]
    url = f"postgresql://trace:{QUOTED_PASSWORD}@127.0.0.1:{port}"
    server: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output:
            made = subprocess.run(
                [*prefix, str(tools / "initdb"), *init],
                cwd=folder,
                stdout=output,
                stderr=output,
                timeout=120,
                check=False,
            )
            assert made.returncode == 0, log.read_text()[-2000:]
            server = subprocess.Popen(
                [*prefix, str(tools / "postgres"), *options], cwd=folder, stdout=output, stderr=output
            )
        wait_for(url, server, log)
        yield url
    finally:
        if server is not None:
            # Fast shutdown: open sessions are ended.
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)
        shutil.rmtree(folder)


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers; an assertion shows its log when it ends or takes over a minute."""
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(f"{url}/postgres").close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)
