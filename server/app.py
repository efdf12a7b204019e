"""The Flower ServerApp: an honest-looking server that records uploads, of single batches or in training."""

from logging import INFO
from typing import cast

import torch  # noqa: F401 (Flower converts arrays to tensors only where torch is already imported)
from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from fedmjp.config import RunConfig
from fedmjp.errors import FederationError
from fedmjp.scenario import read_scenarios
from fedmjp.server.loop import Federation
from fedmjp.server.patience import PatientGrid
from fedmjp.wire import FAILED, PLAYED

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play every scenario of the configuration, one after another, and say in the log's last line what came of it.

    Whoever follows the log need not wait for clients that hang: Flower's simulation does not end while they do.

    Raises:
        FederationError: After the last round, if an upload of single batches was refused; the others are kept. A
            training run goes on without those that are refused.
    """
    try:
        _play(grid, context)
    except Exception as error:
        log(INFO, "%s%s: %s", FAILED, f"{type(error).__module__}.{type(error).__qualname__}", error)
        raise
    log(INFO, PLAYED)


def _play(grid: Grid, context: Context) -> None:
    run = RunConfig.read(context.run_config)
    failures: list[str] = []
    for index, scenario in enumerate(read_scenarios(run)):
        training = scenario.training
        hurried = training is not None and training.round_seconds is None
        patient = cast(Grid, PatientGrid(grid, hurried=hurried))
        refused = Federation(patient, scenario, run, index).play()
        failures += [f"{scenario.label}: {refusal}" for refusal in refused if scenario.training is None]
    if failures:
        raise FederationError("; ".join(failures))
