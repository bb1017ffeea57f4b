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


class Postgres:
    """A server with its own data folder, which can be stopped and started again. `url` has user and password, and no
    database name: append one."""

    def __init__(self, folder: Path) -> None:
        self._tools, self._folder, self._port = binaries(), folder, free_port()
        self._data, self._log = folder / "data", folder / "log"
        # The server ends with this process, even when that is killed.
        self._prefix = ["setpriv", "--pdeathsig", "INT"]
        self._server: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://trace:{QUOTED_PASSWORD}@127.0.0.1:{self._port}"
        password_file = folder / "password"
        password_file.write_text(PASSWORD)
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root.
            self._prefix += ["--reuid", "postgres", "--regid", "postgres", "--init-groups"]
            entry = pwd.getpwnam("postgres")
            for path in (folder, password_file):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        init = (
            f"-D {self._data} -U trace --pwfile={password_file} -A scram-sha-256 -E UTF8 --locale=C --no-sync".split()
        )
        command = [*self._prefix, str(self._tools / "initdb"), *init]
        with self._log.open("ab") as output:
            made = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=120, check=False)
        assert made.returncode == 0, self._log.read_text()[-2000:]

    def start(self) -> None:
        """Return when it answers."""
        settings = ("listen_addresses=127.0.0.1", "fsync=off", "max_connections=60")
        options = ["-D", str(self._data), "-p", str(self._port), "-k", str(self._folder)]
        command = [*self._prefix, str(self._tools / "postgres"), *options, *(f"-c{setting}" for setting in settings)]
        with self._log.open("ab") as output:
            self._server = subprocess.Popen(command, cwd=self._folder, stdout=output, stderr=output)
        wait_for(self.url, self._server, self._log)

    def stop(self) -> None:
        """End it and all open sessions."""
        if self._server is not None:
            # Fast shutdown: open sessions are ended.
            self._server.send_signal(signal.SIGINT)
            self._server.wait(timeout=60)
            self._server = None


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of the server (user and password included) without a database name: append one."""
    folder = Path(tempfile.mkdtemp(prefix="trace-postgres-"))
    server = Postgres(folder)
    try:
        server.start()
        yield server.url
    finally:
        server.stop()
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
