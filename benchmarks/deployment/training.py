"""One training run over the sites of a deployment, each with pictures of its own."""

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fedmjp.benchmarks.deployment import flower
from fedmjp.benchmarks.deployment.access import connect, open_control, read_public_key, require_idle
from fedmjp.benchmarks.deployment.layout import Deployment
from fedmjp.benchmarks.federation.bundle import as_toml, write_app
from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.benchmarks.federation.following import follow, join_errors
from fedmjp.benchmarks.federation.training import draw_history, play_again, rounds_done, watch
from fedmjp.clients.gate.policy import Policy
from fedmjp.errors import ConfigError, FederationError
from fedmjp.scenario import TrainingScenario, make_run_config
from fedmjp.server.events import Event, EventReader
from fedmjp.server.roster import key_of
from fedmjp.training.run_folder import TrainingFolder

ROUND_SECONDS = 3600.0  # for a reply of a site, unless the scenario says its own
PATIENCE_SECONDS = 120.0  # for a SuperLink that is started again


def train_at_sites(
    scenario: TrainingScenario,
    folder: TrainingFolder,
    deployment: Deployment,
    class_names: Sequence[str],
    on_round: Callable[[Mapping[Any, Any]], None],
    on_skipped: Callable[[str], None],
    on_again: Callable[[str], None],
) -> None:
    """Train, and leave everything in the folder; a run goes on from the folder's checkpoint.

    The SuperLink's database is emptied afterwards, whatever happened: uploads have passed through it.

    Args:
        scenario: What to train; its data are the server's validation pictures.
        folder: Of the run.
        deployment: That runs.
        class_names: In the order of the labels; sites have pictures of these.
        on_round: Called with the row of the history that a round left.
        on_skipped: Called with the reason for every picture of the validation split that cannot be read.
        on_again: Called with the reason whenever a round is played again.

    Raises:
        ConfigError: If a site is known not to run what would be sent to it.
        FederationError: If the deployment is not up, another run is in progress, or the run failed; QuorumError after
            the third time in which too few sites answered.
    """
    require_idle(deployment)
    connection = connect(deployment)
    run_config = make_run_config(
        [scenario],
        output_folder=str(folder.root.resolve()),
        events_file=str(folder.events.resolve()),
        class_names=json.dumps(list(class_names)),
        node_keys=node_keys(deployment),
    )
    work = Path(tempfile.mkdtemp(prefix="fedmjp-"))
    try:
        app = write_app(work / "fedmjp")
        require_welcome(deployment, flower.bundle_hash(app), scenario)
        path = work / "run-config.toml"
        path.write_text(as_toml(run_config.flat()), encoding="utf-8")
        on_event = watch(on_round, on_skipped)

        def play() -> None:
            events = EventReader(folder.events)  # before the app can write to it
            _play(deployment, connection, connection.submit(app, path), events, on_event)

        play_again(play, lambda: rounds_done(scenario, folder), on_again)
    finally:
        shutil.rmtree(work)
    draw_history(scenario, folder)


def node_keys(deployment: Deployment) -> tuple[str, ...]:
    """List the keys by which the server knows the sites, whatever number a node claims.

    Args:
        deployment: Whose folder lies on this machine.
    """
    paths = (deployment.public_key(site) for site in deployment.config().sites)
    return tuple(key_of(flower.public_bytes(read_public_key(path))) for path in paths)


def _play(
    deployment: Deployment, connection: Connection, run: str, events: EventReader, on_event: Callable[[Event], None]
) -> None:
    """Follow a run of Flower, which plays the remaining rounds, to its end.

    Raises:
        FederationError: If the run fails; QuorumError for want of updates.
    """
    try:
        error = follow(connection, run, events, on_event, patience=PATIENCE_SECONDS)
    except BaseException:
        _stop(connection, run)
        raise
    finally:
        empty_database(deployment)
    if error:
        raise join_errors("the run failed", [error])


def _stop(connection: Connection, run: str) -> Mapping[str, Any]:
    """Ask a SuperLink to stop a run, and return its answer."""
    return connection.ask("stop", run, connection.name, "--format", "json")


def stop_run(deployment: Deployment, run: int) -> None:
    """Stop a run, whoever started it; nodes go on waiting for others, and its messages are wiped.

    Args:
        deployment: Whose folder lies on this machine.
        run: Its identifier.

    Raises:
        ConfigError: If the folder is no deployment, or no such run is in progress.
        FederationError: If the SuperLink does not answer, or does not stop it.
    """
    with open_control(deployment) as client:
        runs = flower.unfinished_runs(client)
    if run not in runs:
        progress = f"in progress: {', '.join(map(str, runs))}" if runs else "none is in progress"
        raise ConfigError(f"run {run} is not in progress on this server; {progress}")
    answer = _stop(connect(deployment), str(run))
    if not answer.get("success"):
        raise FederationError(
            f"run {run} was not stopped: {answer.get('error-message', 'the SuperLink gives no reason')}"
        )
    empty_database(deployment)


def class_list(text: str) -> list[str]:
    """Split names of classes at their commas, such as ``benign,malignant``.

    Args:
        text: The names, in the order of the labels.

    Raises:
        ConfigError: If there are fewer than two, or one is empty or repeated.
    """
    names = [name.strip() for name in text.split(",")]
    if len(names) < len({*names}) or len({*names} - {""}) < max(2, len(names)):
        raise ConfigError(f"--classes {text}: expected two or more names, each once, such as benign,malignant")
    return names


def at_sites(scenario: TrainingScenario, sites: int, classes: Sequence[str] | None = None) -> TrainingScenario:
    """Adapt a scenario to a deployment: every site is a client, and the server is patient.

    Args:
        scenario: As the user gave it.
        sites: Number of sites of the deployment.
        classes: Names of the classes where sites evaluate; None where the server has public pictures.

    Raises:
        ConfigError: If the scenario has something that only a simulation has.
    """
    training = scenario.training
    if (training.validation == "sites") != (classes is not None):
        raise ConfigError("validation=sites: say which classes there are, such as --classes benign,malignant")
    if classes is not None and len(classes) != scenario.model.classes:
        raise ConfigError(f"model.classes={scenario.model.classes}, but --classes names {len(classes)}: leave it out")
    if scenario.clients != sites:
        raise ConfigError(f"clients = {scenario.clients}, but the deployment has {sites} sites: leave it out")
    planned = scenario.planned(1)
    if planned.defences != scenario.defences:
        guarantees = " ".join(f"--defence {defence.text}" for defence in planned.defences)
        raise ConfigError(
            f"a guarantee is of the whole run, and the server does not know how many pictures sites have: "
            f"say {guarantees}, and steps_per_upload of the site with the most"
        )
    if training.records:
        raise ConfigError("records: a deployment records no uploads; `fedmjp simulate --uploads` does")
    if scenario.server is not None:
        raise ConfigError(f"server {scenario.server.text}: sites with pictures of their own refuse it; use simulate")
    if "round_seconds" in training.model_fields_set:
        return scenario
    patient = training.model_copy(update={"round_seconds": ROUND_SECONDS})
    return scenario.model_copy(update={"training": patient})


def require_welcome(deployment: Deployment, bundle: str, scenario: TrainingScenario) -> None:
    """Check the policies that lie here against the app and its updates.

    Args:
        deployment: Whose folder lies on this machine.
        bundle: SHA-256 of the app.
        scenario: What will be trained.

    Raises:
        ConfigError: If the policy of a site refuses the app or what it will send.
    """
    kind = "gradient" if scenario.training.update == "gradient" else "change"
    for name in deployment.config().sites:
        path = deployment.site(name).policy
        if not path.exists():
            continue
        policy, _ = Policy.read(path)
        if policy.bundles and bundle not in policy.bundles:
            raise ConfigError(f"site {name} would refuse the app: add {bundle} to bundles in {path}, and at the site")
        if policy.kind != kind:
            raise ConfigError(f"site {name} would refuse the updates: set kind: {kind} in {path}, and at the site")


def empty_database(deployment: Deployment) -> None:
    """Wipe former messages from the pages and the log of the SuperLink's database.

    Args:
        deployment: Whose folder lies on this machine.
    """
    path = deployment.config().database
    if not path.exists():
        return
    with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as database:
        database.execute("VACUUM")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
