"""What a deployment is made of: its configuration, and where everything lies in its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import AfterValidator, Field, model_validator

from fedmjp.config import Config
from fedmjp.errors import ConfigError
from fedmjp.files import replacing
from fedmjp.yaml_files import read_yaml

LOOPBACK = "127.0.0.1"
Port = Annotated[int, Field(ge=1, le=65535)]
Site = Annotated[str, Field(pattern=r"^[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?$")]
# Of a host name or an address, as it stands in certificates, URLs and the proxy's configuration.
Host = Annotated[
    str, Field(pattern=r"^(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,250}[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)$")
]


def _each_once(sites: tuple[str, ...]) -> tuple[str, ...]:
    repeated = sorted({site for site in sites if sites.count(site) > 1})
    if repeated:
        raise ValueError(f"site {repeated[0]} is there more than once: give each its own name")
    return sites


class DeploymentConfig(Config):
    """What everybody in a deployment has to agree on."""

    sites: Annotated[tuple[Site, ...], Field(min_length=1), AfterValidator(_each_once)]
    host: Host = Field("localhost", description="name or address by which sites reach the server")
    port: Port = Field(8443, description="that sites reach, of the reverse proxy")
    inside: Port = Field(8000, description="of the SuperLink, on the server's loopback alone")
    state: Path = Field(description="folder of the SuperLink's database, which holds uploads in clear")

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.port == self.inside:
            raise ValueError(f"port and inside are both {self.port}: the proxy and the SuperLink need one each")
        return self

    @property
    def address(self) -> str:
        """Return where sites connect to, as HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def database(self) -> Path:
        """Return the file of the SuperLink's database."""
        return self.state / "superlink.db"


class SiteConfig(Config):
    """What a site's folder says of the site."""

    server: str = Field(description="HOST:PORT of the reverse proxy")
    partition_id: int = Field(ge=0, description="which client this is")
    num_partitions: int = Field(ge=1, description="how many there are")
    data: str = Field("", description="folder of its pictures, as CLASS/picture files")


class SiteFolder:
    """What is carried to a site, and the places of what is in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.authority = self.root / "ca.crt"
        self.key, self.public_key = self.root / "node.key", self.root / "node.pub"
        self.policy, self.config_file = self.root / "policy.yaml", self.root / "site.yaml"
        self.home = self.root / "flower"  # of Flower's programs
        self.ledger = self.root / "ledger" / "gate.jsonl"  # an app's process may write to these two folders alone

    def config(self) -> SiteConfig:
        """Read ``site.yaml``.

        Raises:
            ConfigError: If the folder is no site's.
        """
        return SiteConfig.parse(_mapping(self.config_file))


class Deployment:
    """The folder of a deployment on the server, and the places of what is in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.config_file = self.root / "deploy.yaml"
        self.authority_key = self.root / "ca" / "ca.key"
        self.server = self.root / "server"
        self.authority = self.server / "ca.crt"
        self.certificate, self.key = self.server / "server.crt", self.server / "server.key"
        self.secret = self.server / "superexec.secret"
        self.nginx, self.logs = self.server / "nginx.conf", self.server / "logs"
        self.home = self.server / "flower"  # of Flower's programs: config.toml, app bundles
        self.empty = self.server / "empty"  # working directory: Python would import from another one
        self.units, self.containers = self.root / "units", self.root / "containers"

    def config(self) -> DeploymentConfig:
        """Read ``deploy.yaml``.

        Raises:
            ConfigError: If the folder is no deployment.
        """
        if not self.config_file.is_file():
            raise ConfigError(f"{self.root} is no deployment: fedmjp deploy init {self.root} --sites a,b makes one")
        return DeploymentConfig.parse(_mapping(self.config_file))

    def site(self, name: str) -> SiteFolder:
        """Return the folder that is carried to a site.

        Args:
            name: The site's name.
        """
        return SiteFolder(self.root / "sites" / name)

    def public_key(self, name: str) -> Path:
        """Return the place of a site's public key, which stays when the site's folder was carried away.

        Args:
            name: The site's name.
        """
        return self.server / "keys" / f"{name}.pub"


def as_yaml(values: Mapping[str, object], comment: str = "") -> str:
    """Write a mapping as YAML in its own order, below a comment.

    Args:
        values: What to write.
        comment: Lines for the head of the file; empty writes none.
    """
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def write_private(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Write a file that its owner alone can read, at every moment of the writing.

    Args:
        path: The file, which is replaced.
        content: What it holds afterwards.
        mode: Its permissions in the end.
    """
    with replacing(path) as partial:
        partial.touch(mode=0o600)
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        partial.chmod(mode)


def _mapping(path: Path) -> Mapping[str, object]:
    _, values = read_yaml(path)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected keys and their values")
    return values
