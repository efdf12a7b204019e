"""Compose files and Kubernetes manifests of a deployment, held against Kubernetes' own schema."""

import base64
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fedmjp.benchmarks.deployment.creating import create
from fedmjp.benchmarks.deployment.layout import Deployment, DeploymentConfig
from fedmjp.benchmarks.deployment.rendering import DOCKERFILE, IMAGE, NGINX_IMAGE
from tests.conftest import ROOT

KUBERNETES = ("1.31", "1.37")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    config = DeploymentConfig.parse({"sites": ["north", "south"], "host": "192.0.2.7", "state": "/dev/shm/of-a-test"})
    return create(tmp_path_factory.mktemp("made") / "hospital", config)


def manifests(made: Deployment) -> dict[Path, list[dict[str, Any]]]:
    return {path: list(yaml.safe_load_all(path.read_text())) for path in made.root.rglob("kubernetes.yaml")}


def composed(made: Deployment) -> dict[Path, dict[str, Any]]:
    return {path: yaml.safe_load(path.read_text()) for path in made.root.rglob("compose.yaml")}


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_what_kubernetes_takes(made: Deployment, version: str) -> None:
    kinds = [found["kind"] for objects in manifests(made).values() for found in objects]
    assert sorted(set(kinds)) == ["Deployment", "NetworkPolicy", "PersistentVolumeClaim", "Secret", "Service"]
    for objects in manifests(made).values():
        for one in objects:
            assert kubernetes_validate.validate(one, version, strict=True) == version


def test_a_pod_gets_the_files_of_the_folder_and_nobody_reaches_more_than_the_port(made: Deployment) -> None:
    server = manifests(made)[made.root / "containers" / "kubernetes.yaml"]
    secret, pod, service, network = (
        next(one for one in server if one["kind"] == kind)
        for kind in ("Secret", "Deployment", "Service", "NetworkPolicy")
    )
    spec = pod["spec"]["template"]["spec"]
    volume = next(each for each in spec["volumes"] if each["name"] == "secret")
    items = {item["key"]: item["path"] for item in volume["secret"]["items"]}
    given = {items[key]: base64.b64decode(value) for key, value in secret["data"].items()}
    assert given.pop("deploy.yaml").decode().strip() in made.config_file.read_text()
    assert given == {path: (made.root / path).read_bytes() for path in given}
    assert sorted(given) == [
        "server/ca.crt", "server/keys/north.pub", "server/keys/south.pub", "server/nginx.conf", "server/server.crt",
        "server/server.key", "server/superexec.secret",
    ]  # fmt: skip
    ports = [port["port"] for port in service["spec"]["ports"]]
    assert ports == [port["port"] for rule in network["spec"]["ingress"] for port in rule["ports"]] == [8443]


def test_a_site_reaches_the_server_and_name_servers_alone(made: Deployment) -> None:
    objects = manifests(made)[made.site("north").root / "kubernetes.yaml"]
    names, server = next(one for one in objects if one["kind"] == "NetworkPolicy")["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert server == {"ports": [{"port": 8443, "protocol": "TCP"}], "to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}]}


def test_no_container_may_do_or_change_more_than_it_must(made: Deployment) -> None:
    for path, composed_file in composed(made).items():
        for name, service in composed_file["services"].items():
            assert service["read_only"]
            assert service["cap_drop"] == ["ALL"]
            assert service["restart"] == "unless-stopped"
            of_nginx = {"CHOWN", "SETGID", "SETUID"} if name == "proxy" and os.getuid() == 0 else set()
            assert set(service.get("cap_add", ())) == of_nginx
            for mount in service["volumes"]:
                if mount["type"] == "bind" and not mount["source"].startswith("$"):
                    assert (path.parent / mount["source"]).exists()
                    assert mount["bind"] == {"create_host_path": False}
            assert service["image"] == (NGINX_IMAGE if name == "proxy" else IMAGE)
            if name != "proxy":
                assert (ROOT / service["build"]["dockerfile"]).is_file()
    volumes = composed(made)[made.site("south").root / "compose.yaml"]["services"]["node"]["volumes"]
    assert [mount["target"] for mount in volumes if not mount.get("read_only")] == ["/site/flower", "/site/ledger"]
    (node,) = (
        one for one in manifests(made)[made.site("south").root / "kubernetes.yaml"] if one["kind"] == "Deployment"
    )
    mounts = node["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
    assert writable == ["/site/flower", "/site/ledger", "/tmp"]


def test_the_servers_containers_share_a_loopback_and_one_port_leaves_it(made: Deployment) -> None:
    services = composed(made)[made.containers / "compose.yaml"]["services"]
    assert [name for name, service in services.items() if "ports" in service] == ["network"]
    others = {name: service["network_mode"] for name, service in services.items() if name != "network"}
    assert others == dict.fromkeys(("superlink", "superexec", "proxy"), "service:network")
    state = {"type": "volume", "source": "state", "target": str(made.config().state)}
    holders = [name for name, service in services.items() if state in service["volumes"]]
    assert holders == ["network", "superlink"], "the memory outlives a SuperLink that is started again"
    proxy = {Path(mount["source"]).name for mount in services["proxy"]["volumes"]}
    assert proxy == {"nginx.conf", "ca.crt", "server.crt", "server.key"}, "it has neither secret nor database"


@pytest.mark.skipif(
    subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    if shutil.which("docker")
    else True,
    reason="Docker Compose is not installed",
)
def test_compose_takes_its_files(made: Deployment) -> None:
    for path in composed(made):
        command = ["docker", "compose", "--file", str(path), "config", "--quiet"]
        variables = {**os.environ, "FEDMJP_SOURCE": str(ROOT), "PICTURES": str(path.parent)}
        subprocess.run(command, env=variables, check=True)


def test_what_holds_secrets_is_for_its_owner_alone(made: Deployment) -> None:
    for path in [*manifests(made), *composed(made)]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = re.sub(r"\s", "", made.authority_key.read_text().split("-----")[2])
    everything = "".join(path.read_text() for path in [*manifests(made), *composed(made)])
    assert key not in everything, "nothing that runs has the authority's key"


def test_the_image_has_what_the_commands_need() -> None:
    assert "[training]" in (ROOT / DOCKERFILE).read_text()
