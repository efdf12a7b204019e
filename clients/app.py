"""The Flower ClientApp: gradients, weight deltas or weights from the client's own pictures."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.training import train_round
from fedmjp.config import FederationConfig, ModelConfig, RecordingConfig, TrainingRun, from_run_config
from fedmjp.data.batches import batch_of_round
from fedmjp.data.selection import select_for
from fedmjp.errors import ConfigError
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import record_name
from fedmjp.updates import leaving, local_update

app = ClientApp()


# One process serves several clients in turn; what is kept between messages holds for all of them.
@lru_cache(maxsize=1)
def _architecture(arm: ModelConfig) -> VitClassifier:
    return build_vit(arm)


_selection = lru_cache(maxsize=1)(select_for)


def _leave_for_evaluator(batch: PrivateBatch, arm: ModelConfig, server_round: int, context: Context) -> None:
    folder = from_run_config(RecordingConfig, context.run_config).evaluator_folder
    if folder:
        batch.save(Path(folder) / arm.label / record_name(server_round, context.node_id))


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell the server which client this is."""
    answer = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(content=RecordDict({"config": answer}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a round: of a training run, or of one that records single batches."""
    if from_run_config(TrainingRun, context.run_config).training:
        return train_round(message, context)
    return _upload(message, context)


def _upload(message: Message, context: Context) -> Message:
    """The update that the configuration asks for, of this round's pictures.

    The reply holds gradients or weight deltas ("arrays") and the number of pictures ("metrics"), nothing else.
    """
    config = from_run_config(FederationConfig, context.run_config)
    asked: Any = message.content["config"]
    server_round, arm = int(asked["server-round"]), config.arms[int(asked["arm"])]
    client, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    if clients != config.clients:
        raise ConfigError(f"clients = {config.clients}, but the federation has {clients}; set both to the same number")
    batch = batch_of_round(config, _selection(config), client, server_round)
    _leave_for_evaluator(batch, arm, server_round, context)

    model = _architecture(arm).to(torch.device(config.device))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    sent = leaving(local_update(model, batch, config), batch, config, config.turn(server_round).number)
    content = RecordDict(
        {
            "arrays": ArrayRecord(sent),
            "metrics": MetricRecord({"num-examples": len(batch.pictures)}),
        }
    )
    return Message(content=content, reply_to=message)
