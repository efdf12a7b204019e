"""The server's processes, kept alive by supervisord: SuperLink, SuperExec and the reverse proxy."""

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, DeploymentConfig
from fedmjp.benchmarks.deployment.proxy import end_leftovers
from fedmjp.benchmarks.federation.connection import environment, program
from fedmjp.errors import FederationError

SUPERLINK, SUPEREXEC, PROXY = "superlink", "superexec", "proxy"
STOP_SECONDS = 30
LOG_BYTES = 10_000_000
HEAD = """\
[supervisord]
logfile = {logs}/supervisord.log
pidfile = {logs}/supervisord.pid
childlogdir = {logs}
nocleanup = true
umask = 077

[unix_http_server]
file = {socket}
chmod = 0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl = unix://{socket}
"""
PROGRAM = """
[program:{name}]
command = {command}
directory = {empty}
autorestart = true
startsecs = 1
startretries = 1000000
stopasgroup = true
killasgroup = true
redirect_stderr = true
stdout_logfile = {logs}/{name}.log
stdout_logfile_maxbytes = {log_bytes}
stdout_logfile_backups = 1
"""


def supervisor_configuration(deployment: Deployment, config: DeploymentConfig, nginx: str) -> str:
    """What ``supervisord.conf`` says."""
    parts = [HEAD.format(logs=_escaped(deployment.logs), socket=_escaped(socket_of(config)))]
    for name, command in _commands(deployment, config, nginx).items():
        words = _escaped(shlex.join(command))
        places = {"empty": _escaped(deployment.empty), "logs": _escaped(deployment.logs)}
        parts.append(PROGRAM.format(name=name, command=words, log_bytes=LOG_BYTES, **places))
    return "".join(parts)


def socket_of(config: DeploymentConfig) -> Path:
    """Supervisord's socket: in a folder whose name is short, as names of sockets must be."""
    return config.state / "supervisor.sock"


def database_of(config: DeploymentConfig) -> Path:
    """The SuperLink's database."""
    return config.state / "superlink.db"


def start(deployment: Deployment) -> None:
    """Start supervisord, which goes on in the background; FederationError if it does not start."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", str(deployment.supervisor)],
        check=False,
        cwd=deployment.empty,
        env=environment(deployment.home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise FederationError(f"supervisord did not start: {' '.join((done.stderr or done.stdout).split())}")


def states(deployment: Deployment) -> Mapping[str, str]:
    """Processes and their states, as supervisord tells them; none if it does not run."""
    lines = _control(deployment, "status").splitlines()
    return {words[0]: words[1] for words in map(str.split, lines) if len(words) > 1 and words[0] in NAMES}


def stop(deployment: Deployment) -> bool:
    """Stop all processes and supervisord itself, and whatever outlived a supervisord that was killed.

    Returns:
        Whether there was any.

    Raises:
        FederationError: If supervisord does not end.
    """
    ran = bool(states(deployment))
    if ran:
        pid = int(_control(deployment, "pid"))
        _control(deployment, "shutdown")
        deadline = time.monotonic() + STOP_SECONDS
        while _is_alive(pid):
            if time.monotonic() > deadline:
                raise FederationError(f"supervisord, process {pid}, does not end: see {deployment.logs}")
            time.sleep(0.1)
    end_leftovers(deployment.logs)
    left = [process for process in psutil.process_iter() if _home_of(process) == str(deployment.home)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return ran or bool(left)


def last_words(deployment: Deployment, name: str, lines: int = 5) -> str:
    """The end of a process's log, in one line."""
    log = deployment.logs / f"{name}.log"
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " ".join(" ".join(said[-lines:]).split()) or "it printed nothing"


NAMES = (SUPERLINK, SUPEREXEC, PROXY)


def _commands(deployment: Deployment, config: DeploymentConfig, nginx: str) -> dict[str, list[str]]:
    inside, secret = f"{LOOPBACK}:{config.inside}", ["--superexec-auth-secret-file", str(deployment.secret)]
    superlink = [
        sys.executable,
        "-P",
        "-m",
        "fedmjp.benchmarks.deployment.superlink",
        "--host",
        LOOPBACK,
        "--port",
        str(config.inside),
    ]
    superlink += ["--ssl-ca-certfile", str(deployment.authority), "--ssl-certfile", str(deployment.certificate)]
    superlink += ["--ssl-keyfile", str(deployment.key), "--enable-supernode-auth", "--isolation", "process", *secret]
    superlink += ["--database", str(database_of(config)), "--disable-runtime-dependency-installation"]
    superexec = [program("flower-superexec"), "--root-certificates", str(deployment.authority)]
    superexec += ["--runtime-api-address", inside, *secret]
    proxy = [sys.executable, "-P", "-m", "fedmjp.benchmarks.deployment.proxy", nginx, str(deployment.logs)]
    proxy += [str(deployment.proxy)]
    return {SUPERLINK: superlink, SUPEREXEC: superexec, PROXY: proxy}


def _control(deployment: Deployment, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "supervisor.supervisorctl", "-c", str(deployment.supervisor), *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.stdout


def _home_of(process: psutil.Process) -> str | None:
    """The home that a process of Flower was started with, and that its own inherit."""
    try:
        return process.environ().get("FLWR_HOME")
    except psutil.Error:
        return None


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _escaped(value: object) -> str:
    return str(value).replace("%", "%%")
