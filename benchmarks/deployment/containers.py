"""A deployment in containers: Docker compose files and Kubernetes manifests, of the server and of each site.

All containers are of one image (``Dockerfile``), have no capability but what nginx needs, and no writable place but
what is mounted. What is carried to a site has a compose file and a manifest of its own.
"""

import base64
import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

import fedmjp
from fedmjp.benchmarks.deployment.layout import Deployment, DeploymentConfig, SiteFolder, as_yaml, write_private

IMAGE = f"fedmjp:{fedmjp.__version__}"
DOCKERFILE = "benchmarks/deployment/Dockerfile"
SERVER, SITE, PICTURES, RESULTS, VALIDATION = "/deployment", "/site", "/pictures", "/results", "/validation"
MEMORY = "4gb"  # for the database, through which uploads pass
ACCOUNT = 10001  # of containers in Kubernetes
Volumes = Mapping[str, tuple[str, Mapping[str, Any]]]  # by name: where it is mounted, and what it is
ABOUT_COMPOSE = """\
FEDMJP_SOURCE=CLONE docker compose up --build --detach, in this folder. CLONE is a clone of fedmjp, which the image is
built from: the one that made this file, for sites refuse the code of others.{more}"""
ABOUT_SERVER = """
Public pictures to measure Top-1 on go to validation/. Then: docker compose exec server \\
  fedmjp deploy run /deployment --data /validation --output /results/RUN"""
ABOUT_SITE = """ Name the site's pictures as well: PICTURES=FOLDER. They are mounted read-only.
An app's code runs in this container: give its network no way out but to the server."""
ABOUT_MANIFEST = """\
kubectl apply -f kubernetes.yaml. It holds secrets: keep it where their folder is kept. Build the image {image} from a
clone of fedmjp (docker build -f {dockerfile} -t {image} CLONE) and push it to where the cluster takes images from.
{more}"""
ABOUT_SERVER_MANIFEST = """\
Then: kubectl exec deployment/fedmjp-server -- fedmjp deploy run /deployment --output /results/RUN"""
ABOUT_SITE_MANIFEST = """\
The claim `pictures` is the site's own: a volume with its pictures as CLASS/picture files, mounted read-only."""


def write_server_files(deployment: Deployment, config: DeploymentConfig) -> None:
    """Write ``containers/`` of a deployment: compose file, manifest, and the folders that containers read and write."""
    folder = deployment.root / "containers"
    for part in (folder, folder / "results", folder / "validation"):
        part.mkdir(mode=0o700)
    about = ABOUT_COMPOSE.format(more=ABOUT_SERVER)
    write_private(folder / "compose.yaml", as_yaml(server_compose(config), about))
    write_private(folder / "kubernetes.yaml", _manifest(server_manifest(deployment, config), ABOUT_SERVER_MANIFEST))


def write_site_files(site: SiteFolder, name: str, config: DeploymentConfig) -> None:
    """Write a site's compose file and manifest into the folder that is carried to it."""
    about = ABOUT_COMPOSE.format(more=ABOUT_SITE)
    write_private(site.root / "compose.yaml", as_yaml(site_compose(name), about))
    write_private(site.root / "kubernetes.yaml", _manifest(site_manifest(site, name, config), ABOUT_SITE_MANIFEST))


def server_compose(config: DeploymentConfig) -> dict[str, Any]:
    """The server as a compose file says it: its part of the deployment's folder, and one port."""
    mounts = [
        _bind("../deploy.yaml", f"{SERVER}/deploy.yaml", read_only=True),
        _bind("../server", f"{SERVER}/server"),
        _bind("./results", RESULTS),
        _bind("./validation", VALIDATION, read_only=True),
    ]
    command = ["deploy", "up", SERVER, "--foreground"]
    # Where the account is root, nginx gives its workers another one, and folders of their own.
    more = {} if os.getuid() else {"cap_add": ["CHOWN", "SETGID", "SETUID"]}
    service = _service(command, mounts, ports=[f"{config.port}:{config.port}"], shm_size=MEMORY, **more)
    return {"name": "fedmjp-server", "services": {"server": service}}


def site_compose(name: str) -> dict[str, Any]:
    """A site's node as a compose file says it: its folder, and pictures that it cannot change."""
    source = "${PICTURES:?set it to the folder of this site's pictures}"
    mounts = [_bind(".", SITE), _bind(source, PICTURES, read_only=True)]
    service = _service(["deploy", "node", SITE, "--data", PICTURES], mounts)
    return {"name": f"fedmjp-{name}", "services": {"node": service}}


def server_manifest(deployment: Deployment, config: DeploymentConfig) -> list[dict[str, Any]]:
    """The server as Kubernetes objects; no pod may reach more of it than its port."""
    name = "fedmjp-server"
    keys = [deployment.public_key(site) for site in config.sites]
    parts = [deployment.authority, deployment.certificate, deployment.key, deployment.secret, *keys]
    files = {str(path.relative_to(deployment.root)): path.read_bytes() for path in parts}
    files["deploy.yaml"] = as_yaml(config.model_dump(mode="json")).encode()
    copied = f"cp --recursive --dereference /secret/deploy.yaml /secret/server {SERVER}"
    volumes: Volumes = {
        "deployment": (SERVER, {"emptyDir": {"medium": "Memory"}}),
        "state": (str(config.state.parent), {"emptyDir": {"medium": "Memory"}}),
        "results": (RESULTS, {"persistentVolumeClaim": {"claimName": f"{name}-results"}}),
    }
    port = {"port": config.port, "protocol": "TCP"}
    return [
        _secret(name, files),
        _claim(f"{name}-results", "50Gi"),
        _pod(name, ["deploy", "up", SERVER, "--foreground"], copied, files, volumes, [config.port]),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(name),
            "spec": {"type": "LoadBalancer", "selector": {"app": name}, "ports": [{**port, "targetPort": config.port}]},
        },
        _network(name, {"policyTypes": ["Ingress"], "ingress": [{"ports": [port]}]}),
    ]


def site_manifest(site: SiteFolder, name: str, config: DeploymentConfig) -> list[dict[str, Any]]:
    """A site's node as Kubernetes objects; its pod reaches the server and name servers, and nothing reaches it."""
    title = f"fedmjp-{name}"
    parts = [site.authority, site.key, site.public_key, site.policy, site.config_file]
    files = {path.name: path.read_bytes() for path in parts}
    volumes: Volumes = {
        "site": (SITE, {"persistentVolumeClaim": {"claimName": title}}),
        "pictures": (PICTURES, {"persistentVolumeClaim": {"claimName": "pictures", "readOnly": True}}),
    }
    names = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    server = {"ports": [{"port": config.port, "protocol": "TCP"}], **_to(config.host)}
    egress = {"policyTypes": ["Ingress", "Egress"], "egress": [{"ports": names}, server]}
    command, copied = ["deploy", "node", SITE, "--data", PICTURES], f"cp --dereference /secret/* {SITE}"
    return [
        _secret(title, files),
        _claim(title, "10Gi"),
        _pod(title, command, copied, files, volumes, []),
        _network(title, egress),
    ]


def _service(command: Sequence[str], mounts: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    account = os.getuid()  # whose files are mounted
    return {
        "image": IMAGE,
        "build": {"context": "${FEDMJP_SOURCE:?set it to a clone of fedmjp}", "dockerfile": DOCKERFILE},
        "command": list(command),
        "user": f"{account}:{os.getgid()}",
        "init": True,
        "restart": "unless-stopped",
        "read_only": True,
        "tmpfs": ["/tmp"],  # noqa: S108 (of the container)
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "volumes": list(mounts),
        **more,
    }


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    mount = {"type": "bind", "source": source, "target": target, "bind": {"create_host_path": False}}
    return {**mount, "read_only": True} if read_only else mount


def _secret(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    data = {_key(path): base64.b64encode(content).decode() for path, content in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(name), "type": "Opaque", "data": data}


def _key(path: str) -> str:
    """A file's path as a key of a secret, in which no slash may stand."""
    return path.replace("/", ".")


def _claim(name: str, size: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(name), "spec": spec}


def _pod(
    name: str,
    command: Sequence[str],
    copied: str,
    files: Mapping[str, bytes],
    volumes: Volumes,
    ports: Sequence[int],
) -> dict[str, Any]:
    """One pod at a time, with its files copied out of the secret, where they can be read alone."""
    mounts = [{"name": volume, "mountPath": path} for volume, (path, _) in volumes.items()]
    temporary = {"name": "temporary", "mountPath": "/tmp"}  # noqa: S108 (of the container)
    items = [{"key": _key(path), "path": path} for path in files]
    first = mounts[0]
    locked = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container = {
        "name": "fedmjp",
        "image": IMAGE,
        "args": list(command),
        "ports": [{"containerPort": port} for port in ports],
        "securityContext": locked,
        "volumeMounts": [*mounts, temporary],
    }
    copying = {
        "name": "copy",
        "image": IMAGE,
        "command": ["sh", "-c", f"umask 077 && {copied}"],
        "securityContext": locked,
        "volumeMounts": [{"name": "secret", "mountPath": "/secret", "readOnly": True}, first],
    }
    account = {"runAsNonRoot": True, "runAsUser": ACCOUNT, "runAsGroup": ACCOUNT, "fsGroup": ACCOUNT}
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": {**account, "seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [copying],
        "containers": [container],
        "volumes": [
            {"name": "secret", "secret": {"secretName": name, "defaultMode": 0o440, "items": items}},
            {"name": "temporary", "emptyDir": {}},
            *({"name": volume, **kind} for volume, (_, kind) in volumes.items()),
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(name),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }


def _network(name: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": {"app": name}}, **rules}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(name),
        "spec": spec,
    }


def _to(host: str) -> dict[str, Any]:
    """Where a node may connect to: the server alone, if its address is known; a name may become any address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return {}
    return {"to": [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}]}


def _metadata(name: str) -> dict[str, Any]:
    return {"name": name, "labels": {"app": name}}


def _manifest(objects: Sequence[Mapping[str, Any]], more: str) -> str:
    about = ABOUT_MANIFEST.format(image=IMAGE, dockerfile=DOCKERFILE, more=more)
    head = "".join(f"# {line}\n" for line in about.splitlines())
    return head + yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True)
