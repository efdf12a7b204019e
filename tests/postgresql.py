"""A PostgreSQL server in a folder of its own, from Debian's package, for studies and tests."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedmjp.errors import BadInputError

ACCOUNT = "postgres"  # PostgreSQL refuses to run as root
# A crash of a process loses nothing that was handed to the system, with or without fsync.
OPTIONS = "-c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"


@dataclass(frozen=True)
class Server:
    """A PostgreSQL server on this machine's loopback.

    Attributes:
        folder: Of its data and its log.
        programs: Where `initdb` and `pg_ctl` are.
        port: That it listens on.
        password: Of the account that owns its databases.
    """

    folder: Path
    programs: Path
    port: int
    password: str

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs on the data; CalledProcessError if it fails."""
        other = {"user": ACCOUNT, "group": ACCOUNT, "extra_groups": []} if os.geteuid() == 0 else {}
        command = [self.programs / program, "--pgdata", self.folder / "data", *arguments]
        subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.DEVNULL, **other)  # type: ignore[call-overload]

    def start(self) -> None:
        """Start it, also after it was killed, and wait until it answers."""
        options = f"-p {self.port} {OPTIONS}"
        self.run("pg_ctl", "start", "--wait", "--silent", "--log", str(self.folder / "log"), "--options", options)

    def stop(self) -> None:
        """End it at once."""
        self.run("pg_ctl", "stop", "--silent", "--mode", "immediate")

    def postmaster(self) -> psutil.Process:
        """The process that all others of the server are children of."""
        return psutil.Process(int((self.folder / "data/postmaster.pid").read_text().split()[0]))

    def url(self, database: str, user: str = ACCOUNT, password: str | None = None) -> str:
        """Of one of its databases."""
        return f"postgresql://{user}:{self.password if password is None else password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str) -> None:
        """Execute a statement on the database that is always there."""
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())


@contextmanager
def started(password: str) -> Iterator[Server]:
    """Make and start a server, and remove it in the end.

    Raises:
        BadInputError: If PostgreSQL is not installed.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise BadInputError("there is no PostgreSQL server on this machine; install Debian's package postgresql")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        secret = folder / "password"
        secret.write_text(password)
        if os.geteuid() == 0:
            for path in (folder, secret):
                shutil.chown(path, ACCOUNT)
        server = Server(folder, found[-1].parent, port, password)
        server.run("initdb", f"--username={ACCOUNT}", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            server.stop()
