"""The Flower ClientApp: updates from the client's own pictures, of single batches or in training."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedmjp.clients.consent import Consent
from fedmjp.clients.training import load_weights, open_split, train_round
from fedmjp.config import RunConfig
from fedmjp.data.selection import select_for
from fedmjp.errors import ConfigError, DataError, FedmjpError
from fedmjp.exchange import compute_client_update, prepare_round
from fedmjp.learning import Training
from fedmjp.models.build import build_vit
from fedmjp.records import record_name
from fedmjp.scenario import AnyScenario, Scenario, TrainingScenario, read_scenarios
from fedmjp.training.accuracy import validate
from fedmjp.wire import ARRAYS, CORRECT, EXAMPLES, LOSS, METRICS, REFUSED, UNDECIDED

app = ClientApp()


# One process serves several clients in turn; what is kept between messages holds for all of them.
_architecture = lru_cache(maxsize=1)(build_vit)
_selection = lru_cache(maxsize=1)(select_for)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell the server which client this is.

    Args:
        message: The server's question.
        context: With ``partition-id`` in its node config.
    """
    answer = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(content=RecordDict({"config": answer}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a round with what leaves the client, or with an error of one line.

    Args:
        message: Weights, and the number of the round.
        context: Run config and node config.
    """
    return _reply(message, context, _answer)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Answer weights with how they do on the site's own validation pictures, or with an error of one line.

    Args:
        message: Weights.
        context: Run config and node config.
    """
    return _reply(message, context, _evaluation)


def _reply(message: Message, context: Context, answer: Callable[[RecordDict, Context], RecordDict]) -> Message:
    try:
        return Message(content=answer(message.content, context), reply_to=message)
    except FedmjpError as error:
        return Message(Error(code=REFUSED, reason=f"{type(error).__name__}: {error}"), reply_to=message)


def _answer(content: RecordDict, context: Context) -> RecordDict:
    run, scenario = _asked(content, context)
    server_round = int(cast(Mapping[str, Any], content.config_records["config"])["server-round"])
    client, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    if clients != scenario.clients:
        raise ConfigError(
            f"clients = {scenario.clients}, but the federation has {clients}; set both to the same number"
        )
    if scenario.server is not None and "data" in context.node_config:
        raise ConfigError(f"the scenario has a malicious server ({scenario.server.text}), and the pictures are my own")
    allowed = Consent.of(context.node_config, scenario.data, run.evaluator_folder)
    if isinstance(scenario, TrainingScenario):
        return train_round(scenario, scenario.training, run, content, client, server_round, allowed)
    return _upload(scenario, content, client, server_round, allowed.private)


def _evaluation(content: RecordDict, context: Context) -> RecordDict:
    run, scenario = _asked(content, context)
    if not isinstance(scenario, TrainingScenario) or scenario.training.validation != "sites":
        raise ConfigError("the run does not ask its sites to evaluate: set validation=sites")
    own_folder = Consent.of(context.node_config, scenario.data, "").own
    return _evaluate_split(scenario, scenario.training, run, content, own_folder)


def _asked(content: RecordDict, context: Context) -> tuple[RunConfig, AnyScenario]:
    """Read the run, and the scenario of it that a message belongs to."""
    run, instructions = RunConfig.read(context.run_config), cast(Mapping[str, Any], content.config_records["config"])
    return run, read_scenarios(run)[int(instructions["scenario"])]


def _upload(
    scenario: Scenario, content: RecordDict, client: int, server_round: int, evaluator_folder: Path | None
) -> RecordDict:
    """Compute the update of this round's pictures; nothing leaves beside it but their number."""
    private = prepare_round(scenario, _selection(scenario), client, server_round)
    if evaluator_folder is not None:
        private.save(evaluator_folder / scenario.folder / record_name(server_round, client))
    model = _architecture(scenario.network.model_copy(update={"weights": None})).to(torch.device(scenario.device))
    model.load_state_dict(content.array_records[ARRAYS].to_torch_state_dict())
    sent = compute_client_update(scenario, model, private, scenario.turn(server_round).number)
    return RecordDict({ARRAYS: ArrayRecord(sent), METRICS: MetricRecord({EXAMPLES: len(private.pictures)})})


def _evaluate_split(
    scenario: TrainingScenario, training: Training, run: RunConfig, content: RecordDict, folder: str | None
) -> RecordDict:
    """Count how a model does on a site's validation pictures, and take its mean loss."""
    if folder is None:
        raise DataError("validation=sites: this client has no pictures of its own; sites of a deployment have")
    pictures = open_split(scenario, run, folder, "validation")
    if pictures.digest() == open_split(scenario, run, folder, "train").digest():
        raise DataError(f"validation=sites: {folder} has one set of pictures alone; make train/ and validation/ in it")
    model = load_weights(scenario, training, content)
    accuracy = validate(model, pictures, training.recipe, lambda _reason: None)
    metrics = MetricRecord({EXAMPLES: accuracy.total, CORRECT: accuracy.correct, UNDECIDED: accuracy.undecided})
    metrics[LOSS] = accuracy.loss
    return RecordDict({METRICS: metrics})
