"""Direct mode: the uploads of a federated run, computed in this process without Flower."""

from collections.abc import Callable, Sequence

from benchmarks.federation.simulation import RunFolder
from fedmjp.config import FederationConfig
from fedmjp.data.batches import batch_of_round
from fedmjp.data.selection import select_for
from fedmjp.errors import ConfigError
from fedmjp.models.build import build
from fedmjp.records import Upload, record_name
from fedmjp.updates import gradient
from server.uploads import UploadFolder


def record_directly(
    config: FederationConfig,
    folder: RunFolder,
    *,
    upload_tensors: Sequence[str] = (),
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Compute and record what ``simulate`` would: same seed, same tensors. A client's node is its number.

    Args:
        config: What to run.
        folder: Where uploads and private batches go.
        upload_tensors: Names of the tensors to keep of every upload; empty keeps all.
        on_round: Called at the start of every round.

    Raises:
        ConfigError: If the weights are to move, which takes a server.
        DataError: If there are too few readable pictures.
    """
    if config.server_learning_rate:
        raise ConfigError(f"direct mode keeps the weights; server-learning-rate is {config.server_learning_rate}")
    selection = select_for(config)
    for arm in config.arms:
        model = build(arm).to(config.device)
        uploads = UploadFolder(folder.uploads / arm.label, frozenset(upload_tensors))
        weights = uploads.keep_weights(model.state_dict())
        for server_round in range(1, config.rounds + 1):
            on_round()
            for client in range(config.clients):
                batch = batch_of_round(config, selection, client, server_round)
                batch.save(folder.evaluator / arm.label / record_name(server_round, client))
                uploads.keep(Upload(gradient(model, batch), "gradient", 1, server_round, client, weights))
