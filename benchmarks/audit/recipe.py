"""The recipe that hooks saw: batch, loss, optimiser, rate, steps; and what of it an attacker is told."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedmjp.attacks.adamw import EPSILON
from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.threat import ThreatModel

SGD, ADAMW = "SGD", "AdamW"
# Of pictures that are not normalised; and where nothing says how they are.
PLAIN = ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])


def read_recipe(records: Records) -> dict[str, Any]:
    """Read what clients did between a message and its answer, as the first round shows it; rates of all rounds.

    Args:
        records: Folders of the watched run.
    """
    watched = lines(records.evaluator / "seen.jsonl")
    trained = [line for line in watched if line["forwards"] and line["repeat"] is None]
    if not trained:
        return {"trains": False, "why": "no hook saw a network being trained with torch"}
    first = trained[0]
    optimiser = dict(first["optimiser"])
    rates = sorted({rate for line in trained for rate in line["rates"]})
    sizes = [size for size in first["sizes"] if size]
    return {
        "trains": True,
        "model": first["model"],
        "optimiser": optimiser.get("name", "none"),
        "learning_rate": rates[0] if rates else None,
        "learning_rates": rates,
        "momentum": float(optimiser.get("momentum", 0.0)),
        "weight_decay": float(optimiser.get("weight_decay", 0.0)),
        "epsilon": float(optimiser.get("eps", 0.0)),
        "steps": first["steps"],
        "forwards": first["forwards"],
        "batch_sizes": dict(Counter(map(str, sizes))),
        "batch_size": max(sizes, default=0),
        "examples": sum(sizes),
        "loss": first["loss"],
        "normalisation": normalisation(first["normalisations"]),
        "opacus": _private_optimisers(trained),
        "seconds": first["seconds"],
    }


def _private_optimisers(trained: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List what every client's optimisers of Opacus state, with the sampling and the steps of one round."""
    names = ("steps", "passes", "steps_on_batch")
    stated = [{**optimiser, **{name: line[name] for name in names}} for line in trained for optimiser in line["opacus"]]
    return [optimiser for place, optimiser in enumerate(stated) if optimiser not in stated[:place]]


def normalisation(statistics: Sequence[Sequence[Sequence[float]]]) -> dict[str, list[float]] | None:
    """Return mean and standard deviation that the app makes most use of; None if it makes none.

    Args:
        statistics: Mean and standard deviation (3 channels each) of each normalisation.
    """
    counts = Counter((tuple(mean), tuple(std)) for mean, std in statistics)
    if not counts:
        return None
    mean, std = counts.most_common(1)[0][0]
    return {"mean": list(mean), "std": list(std)}


def channels(recipe: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of three channels; without normalisation pictures stay as they are.

    Args:
        recipe: Of the clients' training.
    """
    stated = recipe.get("normalisation")
    if stated is None:
        return PLAIN
    mean, std = (values * 3 if len(values) == 1 else values for values in (stated["mean"], stated["std"]))
    return (mean, std) if len(mean) == len(std) == 3 else PLAIN


def threat_of(recipe: Mapping[str, Any], kind: str) -> ThreatModel:
    """Build what a server knows that wrote the app: in one step the momentum has had no effect yet.

    Args:
        recipe: Of the clients' training.
        kind: Kind of the answers, such as weights or gradient.
    """
    steps, examples = int(recipe["steps"]), max(int(recipe["examples"]), 1)
    smoothing = float(recipe["loss"].get("label_smoothing", 0.0)) if recipe["loss"] else 0.0
    values: dict[str, Any] = {"update": "gradient", "batch_size": examples, "label_smoothing": smoothing}
    if kind == "weights":
        values |= {
            "update": "delta",
            "local_steps": max(steps, 1),
            "local_learning_rate": recipe["learning_rate"] or 0.01,
            "local_momentum": recipe["momentum"] if steps > 1 else 0.0,
            **optimiser_of(recipe),
            "local_batch_size": recipe["batch_size"] if recipe["batch_size"] < examples else None,
        }
    return ThreatModel.parse(values)


def optimiser_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a scenario about the optimiser; none for SGD, nor for those that no attack reads.

    Args:
        recipe: Of the clients' training.
    """
    if not _is_read(recipe):
        return {}
    return {"local_optimiser": "adamw", "local_weight_decay": recipe["weight_decay"]}


def _is_read(recipe: Mapping[str, Any]) -> bool:
    """Tell whether it is one step of AdamW with the epsilon that ``fedmjp.attacks.adamw`` knows."""
    return (recipe["optimiser"], recipe["steps"], recipe.get("epsilon")) == (ADAMW, 1, EPSILON)


def unreadable(recipe: Mapping[str, Any], kind: str) -> str | None:
    """Explain why no equation is left in an update, whatever the attack; None if one is.

    Args:
        recipe: Of the clients' training.
        kind: Kind of the answers, such as weights or gradient.
    """
    if kind == "weights" and recipe["optimiser"] != SGD and not _is_read(recipe):
        return (
            f"the weights moved by {recipe['steps']} steps of {recipe['optimiser']}: the change is no sum of "
            "gradients, and no attack here solves for them"
        )
    if kind == "weights" and not recipe["steps"]:
        return "no optimiser took a step: the weights are those that the server sent"
    if kind == "nothing":
        return "answers hold no arrays that could be read"
    if kind not in ("weights", "gradient"):
        return "what was sent has other names or shapes than the weights: nobody can say what it is of"
    return None
