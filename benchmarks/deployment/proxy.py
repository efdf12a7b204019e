"""The reverse proxy: nginx with a configuration of ours, which lets the API of SuperNodes through and nothing else.

Started as ``python -m fedmjp.benchmarks.deployment.proxy NGINX LOGS CONFIGURATION``, which becomes nginx.
"""

import os
import shutil
import sys
from pathlib import Path

import psutil

from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, DeploymentConfig
from fedmjp.errors import BadInputError

INSTALL = "the reverse proxy needs nginx, which is not installed; apt-get install nginx-light"
PLACES = "/usr/local/sbin:/usr/sbin:/sbin"  # which are not on everybody's PATH
FLEET = "/v1/fleet/"
GROUP = "proxy.group"  # file with the process group of the last nginx
# Flower cuts arrays into objects of 5 MiB, one request each.
LARGEST_REQUEST = "32m"
# Uploads pass through memory: what nginx cannot hand on at once it would else keep in files.
CONFIGURATION = """\
daemon off;
worker_processes 1;
pid {logs}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log {logs}/proxy.access.log;
    server_tokens off;
    client_body_temp_path {logs}/nginx-body;
    proxy_temp_path {logs}/nginx-proxy;
    fastcgi_temp_path {logs}/nginx-fastcgi;
    uwsgi_temp_path {logs}/nginx-uwsgi;
    scgi_temp_path {logs}/nginx-scgi;
    upstream superlink {{
        server {loopback}:{inside};
        keepalive 16;
        keepalive_timeout 4s;
    }}
    server {{
        listen {listen} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
        client_max_body_size {largest};
        location ^~ {fleet} {{
            limit_except POST {{ deny all; }}
            proxy_pass https://superlink;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_ssl_verify on;
            proxy_ssl_name localhost;
            proxy_ssl_trusted_certificate {authority};
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_max_temp_file_size 0;
        }}
        location / {{ return 403; }}
    }}
}}
"""


def find_nginx() -> str:
    """The program; BadInputError, with how to install it, if there is none."""
    found = shutil.which("nginx") or shutil.which("nginx", path=PLACES)
    if found is None:
        raise BadInputError(INSTALL)
    return found


def proxy_configuration(deployment: Deployment, config: DeploymentConfig) -> str:
    """What ``nginx.conf`` says."""
    return CONFIGURATION.format(
        loopback=LOOPBACK,
        inside=config.inside,
        listen=f"[::]:{config.port}" if ":" in config.host else config.port,
        fleet=FLEET,
        largest=LARGEST_REQUEST,
        logs=_quoted(deployment.logs),
        certificate=_quoted(deployment.certificate),
        key=_quoted(deployment.key),
        authority=_quoted(deployment.authority),
    )


def start(nginx: str, logs: Path, configuration: Path) -> None:
    """Become nginx, after what a former one left behind has ended."""
    end_leftovers(logs)
    (logs / GROUP).write_text(str(os.getpid()))  # of which supervisord has made a process group
    os.execv(nginx, [nginx, "-e", "stderr", "-p", str(logs), "-c", str(configuration)])  # noqa: S606 (no shell)


def end_leftovers(logs: Path) -> None:
    """End workers of an nginx that was killed: they outlive it, and keep its port."""
    group = int((logs / GROUP).read_text()) if (logs / GROUP).exists() else 0
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"] == "nginx" and os.getpgid(process.pid) == group:
                process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue


def _quoted(path: Path) -> str:
    """A path as nginx reads it; BadInputError if it cannot."""
    text = str(path)
    if any(letter in text for letter in "\"'\\$;{}\n") or " " in text:
        raise BadInputError(f"{text}: nginx reads no such path; name a folder without spaces, quotes, $, ; and braces")
    return text


if __name__ == "__main__":
    start(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
