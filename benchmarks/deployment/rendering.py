"""The files by which others run a deployment: systemd units, compose files, Kubernetes manifests, nginx.conf."""

import base64
import ipaddress
import os
import pwd
import re
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import fedmjp
from fedmjp.benchmarks.deployment.layout import Deployment, DeploymentConfig, SiteFolder, as_yaml, write_private
from fedmjp.errors import OutputError

IMAGE = f"fedmjp:{fedmjp.__version__}"
NGINX_IMAGE = "nginx:1.28"
DOCKERFILE = "benchmarks/deployment/Dockerfile"
MEMORY = Path("/run")  # where systemd makes the folder of the database, for the server's account alone
PROGRAM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"  # missing from many users' PATH
PRIVILEGED_PORTS = 1024
# The folders that a container of the server sees: source beside compose.yaml, target, whether it may write there.
MOUNTS = (
    ("../deploy.yaml", "/deployment/deploy.yaml", False),
    ("../server", "/deployment/server", True),
    ("./results", "/results", True),
    ("./validation", "/validation", False),
)


def write_server_files(deployment: Deployment, config: DeploymentConfig) -> None:
    """Write nginx.conf, the server's units, and ``containers/`` with a compose file and a manifest.

    Args:
        deployment: The folder, with certificates and keys in it.
        config: What everybody has agreed on.

    Raises:
        OutputError: If the folder's path is one that nginx or systemd cannot read.
    """
    write_private(deployment.nginx, _render("nginx.conf", config=config))
    _write_units(deployment, config)
    folder = deployment.containers
    for part in (folder, folder / "results", folder / "validation"):
        part.mkdir(mode=0o700)
    of_proxy = [deployment.nginx, deployment.authority, deployment.certificate, deployment.key]
    proxy_files = [path.name for path in of_proxy]
    values = {"config": config, "nginx": NGINX_IMAGE, "proxy_files": proxy_files, "mounts": MOUNTS}
    keys = [deployment.public_key(site) for site in config.sites]
    paths = [*of_proxy, deployment.secret, *keys]
    files = {str(path.relative_to(deployment.root)): path.read_bytes() for path in paths}
    files["deploy.yaml"] = as_yaml(config.model_dump(mode="json")).encode()
    write_private(folder / "compose.yaml", _render("server.compose.yaml", **values))
    write_private(folder / "kubernetes.yaml", _render("server.kubernetes.yaml", **values, files=files))


def write_site_files(site: SiteFolder, name: str, config: DeploymentConfig) -> None:
    """Write a site's unit, compose file and manifest into the folder that is carried to it.

    Args:
        site: The folder, with the site's key in it.
        name: The site's name.
        config: What everybody has agreed on.
    """
    paths = [site.authority, site.key, site.public_key, site.policy, site.config_file]
    values = {"config": config, "name": name, "address": _network_of(config.host)}
    files = {path.name: path.read_bytes() for path in paths}
    write_private(site.root / "fedmjp-node.service", _render("node.service", **values))
    write_private(site.root / "compose.yaml", _render("site.compose.yaml", **values))
    write_private(site.root / "kubernetes.yaml", _render("site.kubernetes.yaml", **values, files=files))


def _write_units(deployment: Deployment, config: DeploymentConfig) -> None:
    """Write a unit for each of the server's three processes."""
    units = deployment.units
    units.mkdir(mode=0o700)
    nginx = shutil.which("nginx") or shutil.which("nginx", path=PROGRAM_PATHS) or "/usr/sbin/nginx"
    fedmjp_program, root = f"{sys.executable} -P -m fedmjp deploy", require_plain_path(deployment.root)
    stem = f"fedmjp-{re.sub(r'[^A-Za-z0-9_.-]', '_', root.name)}"
    superlink = f"{stem}-superlink.service"
    programs: dict[str, dict[str, Any]] = {
        "superlink": {"command": f"{fedmjp_program} superlink {root}", "after": "network-online.target"},
        "superexec": {"command": f"{fedmjp_program} superexec {root}", "after": superlink},
        "proxy": {
            "command": f"{nginx} -e stderr -p {deployment.logs} -c {deployment.nginx}",
            "after": superlink,
            "capabilities": _capabilities(config.port),
            "ambient": "CAP_NET_BIND_SERVICE" if os.getuid() and config.port < PRIVILEGED_PORTS else "",
        },
    }
    if config.state.parent == MEMORY:
        programs["superlink"]["memory"] = config.state.name
    defaults = {"capabilities": "", "ambient": "", "memory": "", "account": pwd.getpwuid(os.getuid()).pw_name}
    for title, values in programs.items():
        unit = _render("server.service", deployment=deployment, title=title, **{**defaults, **values})
        write_private(units / f"{stem}-{title}.service", unit)


def require_plain_path(path: Path) -> Path:
    """Return a path that nginx and systemd read as it is written.

    Args:
        path: Of a deployment's folder.

    Raises:
        OutputError: If the path holds spaces, quotes, ``$``, ``;``, ``%`` or braces.
    """
    if re.search(r"""[\s"'\\$;{}%]""", str(path)):
        raise OutputError(
            f"{path}: nginx or systemd reads no such path; name one without spaces, quotes, $, ;, % and braces"
        )
    return path


def _capabilities(port: int) -> str:
    """Name what the proxy may do: as root, nginx hands its workers to another account."""
    names = [] if os.getuid() else ["CAP_CHOWN", "CAP_SETGID", "CAP_SETUID"]
    return " ".join([*names, *(["CAP_NET_BIND_SERVICE"] if port < PRIVILEGED_PORTS else [])])


def _network_of(host: str) -> str:
    """Return the network that holds the server alone, if the host is an address; a name may become any address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return f"{address}/{address.max_prefixlen}"


def _render(template: str, **values: Any) -> str:
    account: Mapping[str, Any] = {"uid": os.getuid(), "gid": os.getgid(), "image": IMAGE, "dockerfile": DOCKERFILE}
    return _environment().get_template(f"{template}.jinja").render(**account, **values)


@cache
def _environment() -> Environment:
    loader = PackageLoader("fedmjp.benchmarks.deployment")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 (neither HTML nor anybody else's values: names are checked by DeploymentConfig)
    )  # fmt: skip
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment
