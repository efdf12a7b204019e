"""Makes the folder of a deployment: authority, server certificate, a key and a policy for each site."""

import secrets
import shutil
import tempfile
from pathlib import Path

from fedmjp.benchmarks.deployment import certificates, flower
from fedmjp.benchmarks.deployment.layout import Deployment, DeploymentConfig, SiteConfig, as_yaml, write_private
from fedmjp.benchmarks.deployment.rendering import MEMORY, require_plain_path, write_server_files, write_site_files
from fedmjp.benchmarks.federation.bundle import write_app
from fedmjp.errors import OutputError

SECRET_BYTES = 32
PUBLIC = 0o644
ABOUT_AUTHORITY = """\
ca.key signs certificates that all sites of this deployment trust. Nothing that runs needs it: move it to a medium that
is not connected, and bring it back when the server's certificate is due ({days} days after it was made).
"""
ABOUT_POLICY = """\
What may leave this site. clients/gate/README.md of fedmjp lists all keys. Nobody but the site changes it, and then says
so: fedmjp gate accept --policy policy.yaml
kind: what fedmjp's clients send, change of weights; gradient with --strategy fedsgd.
bundles: the apps that may run here, by SHA-256. A bundle is code: it reads what this process may read."""
ABOUT_SITE = "data: folder of this site's pictures, as CLASS/picture files; it never leaves the site."
ABOUT_DEPLOYMENT = """\
state: folder of the SuperLink's database, through which uploads pass in clear. The units and containers make this one
in memory and remove it when the server stops. On a disk, take an encrypted one, and remove it yourself."""


def create(root: Path, config: DeploymentConfig) -> Deployment:
    """Make a deployment's folder, with nothing secret that anybody but its owner can read.

    Args:
        root: The folder; it must not be there, or be empty.
        config: What everybody has to agree on.

    Raises:
        OutputError: If there is something in the folder, or nginx or systemd cannot read its path.
    """
    deployment = Deployment(root)
    require_plain_path(deployment.root)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise OutputError(f"{root} is not empty: name a new folder")
        root.chmod(0o700)
    except (NotADirectoryError, FileExistsError):
        raise OutputError(f"{root} is no folder: name a new one") from None
    _write_server(deployment, config)
    bundle = own_bundle()
    for number, name in enumerate(config.sites):
        _write_site(deployment, config, name, number, bundle)
        write_site_files(deployment.site(name), name, config)
    write_server_files(deployment, config)
    values = config.model_dump(mode="json")
    write_private(deployment.config_file, as_yaml(values, ABOUT_DEPLOYMENT))
    return deployment


def state_folder() -> Path:
    """Draw a name for the database's folder, which systemd or containers make in memory."""
    return MEMORY / f"fedmjp-{secrets.token_hex(8)}"


def own_bundle() -> str:
    """Compute the SHA-256 of the app bundle that this installation of fedmjp sends to sites."""
    folder = Path(tempfile.mkdtemp(prefix="fedmjp-"))
    try:
        return flower.bundle_hash(write_app(folder / "fedmjp"))
    finally:
        shutil.rmtree(folder)


def _write_server(deployment: Deployment, config: DeploymentConfig) -> None:
    for folder in (
        deployment.authority_key.parent,
        deployment.server,
        deployment.home,
        deployment.logs,
        deployment.empty,
        deployment.public_key("").parent,
    ):
        folder.mkdir(mode=0o700)
    authority_key, key = certificates.make_key(), certificates.make_key()
    authority = certificates.make_authority(authority_key)
    certificate = certificates.make_server(key, authority, authority_key, config.host)
    write_private(deployment.authority_key, certificates.private_pem(authority_key))
    about = ABOUT_AUTHORITY.format(days=certificates.SERVER_DAYS)
    write_private(deployment.authority_key.with_name("README"), about, PUBLIC)
    write_private(deployment.authority, certificates.pem(authority), PUBLIC)
    write_private(deployment.certificate, certificates.pem(certificate), PUBLIC)
    write_private(deployment.key, certificates.private_pem(key))
    write_private(deployment.secret, secrets.token_bytes(SECRET_BYTES))


def _write_site(deployment: Deployment, config: DeploymentConfig, name: str, number: int, bundle: str) -> None:
    site = deployment.site(name)
    site.root.parent.mkdir(mode=0o700, exist_ok=True)
    for folder in (site.root, site.home, site.ledger.parent):
        folder.mkdir(mode=0o700)
    key = certificates.make_key()
    public = certificates.public_openssh(key)
    write_private(site.key, certificates.private_openssh(key))
    for path in (site.public_key, deployment.public_key(name)):
        write_private(path, public, PUBLIC)
    write_private(site.authority, deployment.authority.read_bytes(), PUBLIC)
    ledger = str(site.ledger.relative_to(site.root))
    write_private(site.policy, as_yaml({"ledger": ledger, "kind": "change", "bundles": [bundle]}, ABOUT_POLICY))
    about = SiteConfig(server=config.address, partition_id=number, num_partitions=len(config.sites))
    write_private(site.config_file, as_yaml(about.model_dump(), ABOUT_SITE))
