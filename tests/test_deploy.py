"""The folder of a deployment: certificates by OpenSSL's word, nothing secret for others, errors in one line."""

import shutil
import sqlite3
import stat
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.supercore import sql_mixin
from flwr.superlink.config_loader import get_objectstore_linkstate_factories
from flwr.superlink.federation import NoOpFederationManager
from sqlalchemy import text

from fedmjp.benchmarks.deployment.creating import create
from fedmjp.benchmarks.deployment.intrusions import ExpectedRefusalError, try_intrusion
from fedmjp.benchmarks.deployment.layout import Deployment, DeploymentConfig
from fedmjp.benchmarks.deployment.server import hand_out_again, register_keys, run_superlink, wait_for_locks
from fedmjp.benchmarks.deployment.training import at_sites, require_welcome
from fedmjp.clients.gate.policy import Policy
from fedmjp.data.datasets import open_dataset
from fedmjp.errors import ConfigError, DataError, OutputError
from tests.federations import scenario_of
from tests.test_cli import BAD_INPUT, run
from tests.units import read_units

SHA256 = 64


def openssl(*arguments: object) -> str:
    return subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    with pytest.MonkeyPatch.context() as patched:
        root = tmp_path_factory.mktemp("deployment") / "hospital"
        assert run(patched, "deploy", "init", str(root), "--sites", "north,south", "--host", "fl.example.org") == 0
    return Deployment(root)


def test_nothing_secret_is_readable_by_others_and_a_site_gets_what_is_its_own(made: Deployment) -> None:
    public = {"ca.crt", "server.crt", "node.pub", "north.pub", "south.pub", "README"}
    for path in (made.root, *made.root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o644 if path.name in public else 0o600), path
    for number, name in enumerate(("north", "south")):
        site = made.site(name)
        assert {path.name for path in site.root.iterdir()} == {
            "ca.crt", "compose.yaml", "fedmjp-node.service", "flower", "kubernetes.yaml", "ledger", "node.key",
            "node.pub", "policy.yaml", "site.yaml",
        }  # fmt: skip
        assert (site.config().partition_id, site.config().num_partitions) == (number, 2)
        assert site.config().server == "fl.example.org:8443"
        assert made.public_key(name).read_bytes() == site.public_key.read_bytes()
    assert made.site("north").key.read_bytes() != made.site("south").key.read_bytes()
    assert "north" not in str(made.config().state)


def test_certificates_and_keys_are_what_openssl_and_openssh_take(made: Deployment) -> None:
    for name in ("fl.example.org", "localhost"):
        said = openssl("verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", name,
                       "-CAfile", made.authority, made.certificate)  # fmt: skip
        assert said.strip().endswith("OK")
    openssl("verify", "-verify_ip", "127.0.0.1", "-CAfile", made.authority, made.certificate)
    with pytest.raises(subprocess.CalledProcessError):
        openssl("verify", "-verify_hostname", "other.example.org", "-CAfile", made.authority, made.certificate)
    assert openssl("x509", "-in", made.certificate, "-noout", "-pubkey") == openssl("pkey", "-in", made.key, "-pubout")
    told = openssl("x509", "-in", made.authority, "-noout", "-text")
    assert "CA:TRUE, pathlen:0" in told
    assert "secp384r1" in told
    for name in ("north", "south"):
        site = made.site(name)
        derived = subprocess.run(["ssh-keygen", "-y", "-f", site.key], check=True, capture_output=True, text=True)
        assert derived.stdout.split()[:2] == site.public_key.read_text().split()[:2]
        assert derived.stdout.startswith("ecdsa-sha2-nistp384 ")


def test_a_sites_policy_lists_the_bundle_that_would_be_sent(made: Deployment, tmp_path: Path) -> None:
    policy, ledger = Policy.read(made.site("north").policy)
    assert [len(bundle) for bundle in policy.bundles] == [SHA256]
    assert ledger == made.site("north").ledger
    require_welcome(made, policy.bundles[0], scenario_of())
    with pytest.raises(ConfigError, match="site north would refuse the app: add 00"):
        require_welcome(made, "0" * SHA256, scenario_of())
    with pytest.raises(ConfigError, match="site north would refuse the updates: set kind: gradient"):
        require_welcome(made, policy.bundles[0], scenario_of(strategy="fedsgd"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "NEW", "--sites", "a,b,a"], "site a is there more than once"),
        (["init", "NEW", "--sites", "a,../b"], "sites.1 = '../b'"),
        (["init", "NEW", "--sites", ""], "sites.0 = ''"),
        (["init", "NEW", "--sites", "a", "--host", "two words"], "host = 'two words'"),
        (["init", "NEW", "--sites", "a", "--port", "8000"], "port and inside are both 8000"),
        (["init", "NEW", "--sites", "a", "--port", "70000"], "port = 70000"),
        (["init", "FULL", "--sites", "a"], "is not empty: name a new folder"),
        (["init", "FILE", "--sites", "a"], "is no folder: name a new one"),
        (["init", "A PLACE", "--sites", "a"], "name one without spaces, quotes"),
        (["superlink", "FULL"], "is no deployment: fedmjp deploy init"),
        (["superexec", "FULL"], "is no deployment: fedmjp deploy init"),
        (["run", "FULL"], "is no deployment: fedmjp deploy init"),
        (["check", "FULL"], "is no deployment: fedmjp deploy init"),
        (["stop", "FULL", "7"], "is no deployment: fedmjp deploy init"),
        (["node", "FULL"], "site.yaml cannot be read"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "FULL").mkdir()
    for name in ("FULL/something", "FILE"):
        (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    words = [str(tmp_path / word) if word in ("NEW", "FULL", "FILE", "A PLACE") else word for word in arguments]
    assert run(monkeypatch, "deploy", *words) == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in " ".join(printed.split())
    assert printed.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_missing_is_told_with_what_to_do(
    made: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> str:
        assert run(monkeypatch, "deploy", *arguments) in (1, BAD_INPUT)
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        return printed

    site, root = str(made.site("north").root), str(made.root)
    assert "no pictures: name their folder by --data, or as data in" in told("node", site)
    assert "there is no folder /nowhere" in told("node", site, "--data", "/nowhere")
    for command in (["run", root], ["check", root], ["stop", root, "7"]):
        assert "does not answer at 127.0.0.1:8000: start the server's units or containers" in told(*command)


def test_a_deployment_plays_no_cheating_server_and_records_nothing() -> None:
    with pytest.raises(ConfigError, match="a deployment records no uploads"):
        at_sites(scenario_of(records=(1,)), 2)
    with pytest.raises(ConfigError, match="clients = 2, but the deployment has 3 sites"):
        at_sites(scenario_of(), 3)
    with pytest.raises(ConfigError, match=r"say --defence local_dp:.*rounds=3.*, and steps_per_upload of the site"):
        at_sites(scenario_of(defences=["local_dp:epsilon=8"]), 2)
    with pytest.raises(ConfigError, match="sites with pictures of their own refuse it"):
        at_sites(scenario_of(server="suppression"), 2)
    patient, own = (at_sites(scenario_of(**said), 2).training for said in ({}, {"round_seconds": 5.0}))
    assert patient is not None
    assert own is not None
    assert (patient.round_seconds, own.round_seconds) == (3600.0, 5.0)


def test_labels_are_the_runs_at_a_site_that_lacks_a_class(tmp_path: Path) -> None:
    for name in ("cat", "fox"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    site = open_dataset(str(tmp_path), "train", classes=3)
    assert site.labels.tolist() == [0, 1]
    assert site.labelled_as(["cat", "dog", "fox"]).labels.tolist() == [0, 2]
    with pytest.raises(DataError, match=r"pictures of class 'fox', which is none of the run's 3: did you mean 'fix'\?"):
        site.labelled_as(["cat", "dog", "fix"])


def test_what_a_dead_superlink_handed_out_and_nobody_confirmed_is_handed_out_again(tmp_path: Path) -> None:
    database = tmp_path / "superlink.db"
    hand_out_again(database)
    assert not database.exists(), "there is nothing before the first start"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE objects (object_id TEXT)")
    hand_out_again(database)  # of a SuperLink that was killed before it had made all tables
    database.unlink()
    _, states = get_objectstore_linkstate_factories(str(database), NoOpFederationManager())
    states.state()
    with closing(sqlite3.connect(database)) as connection, connection:
        for name in ("lost", "answered", "confirmed"):
            connection.execute("INSERT INTO message_ins (message_id, delivered_at) VALUES (?, 'then')", [name])
        for name, asked in (("unread", "answered"), ("read", "confirmed")):
            values = [name, asked]
            connection.execute(
                "INSERT INTO message_res (message_id, reply_to_message_id, delivered_at) VALUES (?, ?, 'then')", values
            )
        for name in ("lost", "answered", "unread"):
            connection.execute("INSERT INTO objects (object_id, is_available) VALUES (?, 1)", [name])
    hand_out_again(database)
    with closing(sqlite3.connect(database)) as connection:
        asked = dict(connection.execute("SELECT message_id, delivered_at FROM message_ins").fetchall())
        replies = dict(connection.execute("SELECT message_id, delivered_at FROM message_res").fetchall())
    assert asked == {"lost": "", "answered": "then", "confirmed": "then"}
    assert replies == {"unread": "", "read": "then"}


def test_the_superlinks_connections_wait_for_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
    wait_for_locks()
    _, states = get_objectstore_linkstate_factories(str(tmp_path / "superlink.db"), NoOpFederationManager())
    state: Any = states.state()
    with state.session() as session:
        assert session.execute(text("PRAGMA busy_timeout")).scalar() == 60_000
        assert session.execute(text("PRAGMA journal_mode")).scalar() == "wal"


def test_only_a_refusal_counts_as_one() -> None:
    def refuse() -> str:
        raise ExpectedRefusalError("by name")

    def break_down() -> str:
        raise OSError("no network")

    assert try_intrusion("it", refuse).line == "refused             it: by name"
    assert try_intrusion("it", lambda: "the key").line == "NOT REFUSED         it: the key"
    assert try_intrusion("it", break_down).line == "could not be tried  it: OSError: no network"


def test_a_database_folder_that_others_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    deployment = create(tmp_path / "hospital", DeploymentConfig(sites=("a",), state=tmp_path / "state"))
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(OutputError, match="state cannot hold the database: Operation not permitted; set state"):
        run_superlink(deployment)


def test_sites_are_registered_once_whatever_is_started_again(tmp_path: Path) -> None:
    _, states = get_objectstore_linkstate_factories(str(tmp_path / "superlink.db"), NoOpFederationManager())
    state, keys = states.state(), [b"north", b"south"]
    for _ in range(2):
        register_keys(state, keys)  # type: ignore[arg-type]
    assert sorted(info.public_key for info in state.get_node_info()) == keys


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(made: Deployment) -> None:
    units = [*made.units.iterdir(), made.site("north").root / "fedmjp-node.service"]
    verified = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    lines = [line for line in verified.stderr.splitlines() if "is not executable" not in line]  # what is not installed
    assert (lines, len(units)) == ([], 4)


def test_a_sites_unit_lets_an_app_write_neither_policy_nor_key(made: Deployment, tmp_path: Path) -> None:
    text = (made.site("north").root / "fedmjp-node.service").read_text()
    for line in (
        "ProtectSystem=strict",
        "ReadWritePaths=%Y/flower %Y/ledger",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "UMask=0077",
    ):
        assert line in text.splitlines()
    assert "IPAddressDeny" not in text, "a name may become any address"
    site = made.site("north")
    assert {site.home.parent, site.ledger.parent.parent} == {site.root}
    assert not any(
        path.is_relative_to(folder) for path in (site.policy, site.key) for folder in (site.home, site.ledger.parent)
    )
    config = DeploymentConfig(sites=("a",), host="192.0.2.7", state=tmp_path / "state")
    unit = create(tmp_path / "numbered", config).site("a").root / "fedmjp-node.service"
    assert "IPAddressDeny=any\nIPAddressAllow=localhost 192.0.2.7/32\n" in unit.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_little_that_a_sites_unit_is_exposed_to(made: Deployment, tmp_path: Path) -> None:
    config = DeploymentConfig(sites=("a",), host="192.0.2.7", state=tmp_path / "state")
    numbered = create(tmp_path / "numbered", config).site("a")
    for site, most in ((made.site("north"), 3.0), (numbered, 2.5)):
        unit = site.root / "fedmjp-node.service"
        command = ["systemd-analyze", "security", "--offline=true", f"--threshold={int(10 * most)}", str(unit)]
        analysed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert analysed.returncode == 0, analysed.stdout


@pytest.mark.skipif(not Path("/usr/sbin/nginx").exists(), reason="nginx is not installed")
def test_nginx_takes_its_configuration(made: Deployment) -> None:
    (command,) = (unit.command for unit in read_units(made.units) if unit.name.endswith("-proxy.service"))
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr
