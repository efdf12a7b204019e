"""What a site tells of a model: how it does on the site's own validation pictures, which never leave it."""

from flwr.app import MetricRecord, RecordDict

from fedmjp.clients.training import load_weights, open_split
from fedmjp.config import RunConfig
from fedmjp.errors import DataError
from fedmjp.learning import Training
from fedmjp.scenario import TrainingScenario
from fedmjp.training.accuracy import validate
from fedmjp.wire import CORRECT, EXAMPLES, LOSS, METRICS, UNDECIDED


def evaluate_round(
    scenario: TrainingScenario, training: Training, run: RunConfig, content: RecordDict, own: str | None
) -> RecordDict:
    """Counts and the mean loss on a site's validation pictures.

    Raises:
        CheckpointError: If the weights are of another architecture.
        DataError: If there are no pictures of the site's own that it does not train on.
    """
    if own is None:
        raise DataError("validation=sites: this client has no pictures of its own; sites of a deployment have")
    pictures = open_split(scenario, run, own, "validation")
    if pictures.digest() == open_split(scenario, run, own, "train").digest():
        raise DataError(f"validation=sites: {own} has one set of pictures alone; make train/ and validation/ in it")
    model = load_weights(scenario, training, content)
    accuracy = validate(model, pictures, training.recipe, lambda _reason: None)
    told = MetricRecord({EXAMPLES: accuracy.total, CORRECT: accuracy.correct, UNDECIDED: accuracy.undecided})
    told[LOSS] = accuracy.loss
    return RecordDict({METRICS: told})
