"""Common parts of `fedmjp simulate` and `fedmjp deploy run`: the scenario's values, and the results of a run."""

from typing import TYPE_CHECKING, Any

from fedmjp.cli.console import tell
from fedmjp.cli.overrides import merged
from fedmjp.cli.runs import with_warm_up

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.scenario import TrainingScenario
    from fedmjp.training.run_folder import TrainingFolder

TOLD = 10  # refusals that are listed on the terminal
DEFAULTS = {"model": {"name": "deit_small"}}


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in what follows from values: the warm-up, and a recipe that can be recorded.

    Args:
        values: By key; they win.
    """
    from fedmjp.benchmarks.federation.training import AS_SHOWN
    from fedmjp.learning import Training

    rounds, local = (values.get(name, Training.model_fields[name].default) for name in ("rounds", "local_epochs"))
    if values.get("strategy") == "fedsgd" and values.get("records"):
        values = merged({"recipe": {**AS_SHOWN, "batch_size": 1}}, values)
    return with_warm_up(values, rounds * local if isinstance(rounds, int) and isinstance(local, int) else None)


def read_scenario(values: dict[str, Any]) -> "TrainingScenario":
    """Read a scenario from values, in which those of the training stand beside all others, as in `fedmjp train`.

    Args:
        values: By key.

    Raises:
        ConfigError: If a key is unknown, or a value is out of range.
    """
    from fedmjp.errors import ConfigError, suggestion
    from fedmjp.learning import Training
    from fedmjp.scenario import TrainingScenario

    unread = {name: value for name, value in values.items() if name not in Training.model_fields}
    keys = [key for key in (*Training.keys(), *TrainingScenario.keys()) if not key.startswith("training")]
    recipe = values.get("recipe")
    if isinstance(recipe, dict) and "epochs" in recipe:
        raise ConfigError("recipe.epochs is not of a federation: set rounds and local_epochs")
    for key in unread:
        if key not in keys:
            raise ConfigError(f"unknown key {key!r}, {suggestion(key, keys)}")
    training = {name: value for name, value in values.items() if name in Training.model_fields}
    return TrainingScenario.parse({**unread, "training": Training.parse(training)})


def tell_results(scenario: "TrainingScenario", folder: "TrainingFolder", console: "Console") -> None:
    """Tell whose replies were refused, and where everything is.

    Args:
        scenario: Of the run.
        folder: Of the run.
        console: To print on.
    """
    from fedmjp.server.refusals import RefusalFile
    from fedmjp.wire import round_folder

    refused = RefusalFile(folder.refused).read()
    tell(console, *(f"Refused: {refusal}" for refusal in refused[:TOLD]))
    if len(refused) > TOLD:
        tell(console, f"{len(refused)} replies were refused in all; see {folder.refused}.")
    tell(console, f"Written to {folder.root}: weights.safetensors, history.csv, history.png.")
    for server_round in sorted(scenario.training.records):
        tell(console, f"Uploads of round {server_round}: {round_folder(folder.records, server_round)}")
