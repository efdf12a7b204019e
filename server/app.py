"""The Flower ServerApp: an honest-looking server that records uploads, of single batches or in training."""

from typing import cast

import torch  # noqa: F401 (Flower converts arrays to tensors only where torch is already imported)
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedmjp.config import RunConfig
from fedmjp.errors import FederationError
from fedmjp.scenario import read_scenarios
from fedmjp.server.events import EventFile
from fedmjp.server.loop import Federation
from fedmjp.server.patience import PatientGrid

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play every scenario of the configuration, one after another; the last event says what came of it.

    Whoever follows the events need not wait for clients that hang: Flower's simulation does not end while they do.

    Args:
        grid: Reaches the clients.
        context: Holds the run's configuration.

    Raises:
        FederationError: After the last round, if an upload of single batches was refused; the others are kept. A
            training run goes on without those that are refused.
    """
    run = RunConfig.read(context.run_config)
    events = EventFile.of_run(run)
    try:
        _play(grid, run)
    except Exception as error:
        events.add("error", type=f"{type(error).__module__}.{type(error).__qualname__}", message=str(error))
        raise
    events.add("end")


def _play(grid: Grid, run: RunConfig) -> None:
    failures: list[str] = []
    for index, scenario in enumerate(read_scenarios(run)):
        training = scenario.training
        hurried = training is not None and training.round_seconds is None
        patient = cast(Grid, PatientGrid(grid, hurried=hurried))
        refused = Federation(patient, scenario, run, index).play()
        failures += [f"{scenario.label}: {refusal}" for refusal in refused if scenario.training is None]
    if failures:
        raise FederationError("; ".join(failures))
