"""The Flower ServerApp: an honest-looking server that records uploads, of single batches or in training."""

import json
from pathlib import Path

import torch  # noqa: F401 (Flower converts arrays to tensors only where torch is already imported)
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedmjp.config import FederationConfig, ModelConfig, RecordingConfig, TrainingRun, from_run_config
from fedmjp.errors import ConfigError, FederationError
from fedmjp.models.build import build_vit
from fedmjp.training.config import FederatedConfig
from fedmjp.training.run_folder import TrainingFolder
from server.strategy import OneStep
from server.tap import UploadTap
from server.training import FederatedTraining
from server.uploads import UploadFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, or record every arm of the configuration, one after another.

    Raises:
        FederationError: When recording, after the last round, if any client failed; the others' uploads
            are kept.
    """
    training = from_run_config(TrainingRun, context.run_config)
    if training.training:
        _train(grid, context, training)
    else:
        _record(grid, context)


def _train(grid: Grid, context: Context, run: TrainingRun) -> None:
    if not run.output_folder:
        raise ConfigError("output-folder is empty; name the folder that history and weights go to")
    config = FederatedConfig.parse(json.loads(run.training))
    records = from_run_config(RecordingConfig, context.run_config).uploads_folder
    folder = TrainingFolder(Path(run.output_folder))
    FederatedTraining(grid, config, folder, Path(records) if records else None, shares=run.share_sizes).run()


def _record(grid: Grid, context: Context) -> None:
    config = from_run_config(FederationConfig, context.run_config)
    failures: list[str] = []
    for index, arm in enumerate(config.arms):
        tap = UploadTap(grid, _recording_folder(context, arm), config.update)
        strategy = OneStep(update=config.update, learning_rate=config.server_learning_rate, clients=config.clients)
        strategy.start(
            grid=tap,
            initial_arrays=ArrayRecord(build_vit(arm).state_dict()),
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
