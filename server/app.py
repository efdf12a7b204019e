"""The Flower ServerApp: an honest-looking server that records every upload."""

from pathlib import Path

import torch  # noqa: F401 (Flower converts arrays to tensors only where torch is already imported)
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedmjp.config import FederationConfig, ModelConfig, RecordingConfig, from_run_config
from fedmjp.errors import FederationError
from fedmjp.models.build import build
from server.strategy import OneStep
from server.tap import UploadTap
from server.uploads import UploadFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run every arm of the configuration, one after another.

    Raises:
        FederationError: After the last round, if any client failed; the others' uploads are kept.
    """
    config = from_run_config(FederationConfig, context.run_config)
    failures: list[str] = []
    for index, arm in enumerate(config.arms):
        tap = UploadTap(grid, _recording_folder(context, arm), config.update)
        strategy = OneStep(update=config.update, learning_rate=config.server_learning_rate, clients=config.clients)
        strategy.start(
            grid=tap,
            initial_arrays=ArrayRecord(build(arm).state_dict()),
            num_rounds=config.rounds,
            train_config=ConfigRecord({"arm": index}),
        )
        failures += [f"{arm.label}: {failure}" for failure in tap.failures + tap.unanswered()]
    if failures:
        raise FederationError("; ".join(failures))


def _recording_folder(context: Context, arm: ModelConfig) -> UploadFolder | None:
    recording = from_run_config(RecordingConfig, context.run_config)
    if not recording.uploads_folder:
        return None
    return UploadFolder(Path(recording.uploads_folder) / arm.label, frozenset(recording.upload_tensors))
