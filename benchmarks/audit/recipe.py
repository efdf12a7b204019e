"""The recipe that hooks saw: batch, loss, optimiser, rate, steps; and what of it an attacker is told."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmjp.attacks.adamw import EPSILON
from fedmjp.benchmarks.audit.running import Records, answers_with_data, lines
from fedmjp.step import SgdRule, UnrolledSgd, unroll_sgd
from fedmjp.tensors import without_decay
from fedmjp.threat import ThreatModel

SGD, ADAM, ADAMW = "SGD", "Adam", "AdamW"
# Of pictures that are not normalised; and where nothing says how they are.
PLAIN = ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
# Of pixels before they are normalised, the narrowest first; and the share of it that channels' statistics may exceed.
RANGES = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0), (-128.0, 128.0))
SLACK = 0.1


def read_recipe(records: Records, message: str | None = None) -> dict[str, Any]:
    """Read what a client did between a message and its answer; beside it the rates of all rounds.

    Args:
        records: Folders of the watched run.
        message: Identifier of the training message; None for the first.
    """
    watched = lines(records.evaluator / "seen.jsonl")
    trained = [line for line in watched if line["forwards"] and line["repeat"] is None]
    if not trained:
        asked = any(line["type"].startswith("train") for line in records.wire()) or not answers_with_data(records)
        why = "no hook saw a network being trained with torch" if asked else "no client is asked to train a network"
        return {"trains": False, "is_asked_to_train": asked, "why": why}
    first = next((line for line in trained if line["id"] == message), trained[0])
    groups = _parameter_groups(first)
    rules = [rule for group in groups for _, rule in group["steps"]]
    rates = sorted(
        {rule.get("lr", 0.0) for line in trained for group in _parameter_groups(line) for _, rule in group["steps"]}
    )
    sizes = [size for size in first["sizes"] if size]
    return {
        "trains": True,
        "model": first["model"],
        "optimiser": " and ".join(dict.fromkeys(group["optimiser"] for group in groups)) or "none",
        "learning_rate": min((rule.get("lr", 0.0) for rule in rules), default=None),
        "learning_rates": rates,
        "momentum": max((rule.get("momentum", 0.0) for rule in rules), default=0.0),
        "weight_decay": max((rule.get("weight_decay", 0.0) for rule in rules), default=0.0),
        "epsilon": max((rule.get("eps", 0.0) for rule in rules), default=0.0),
        "groups": groups,
        "steps": max((sum(count for count, _ in group["steps"]) for group in groups), default=0),
        "forwards": first["forwards"],
        "batch_sizes": dict(Counter(map(str, sizes))),
        "batch_size": max(sizes, default=0),
        "examples": first["examples"],
        "passes": round(sum(sizes) / max(first["examples"], 1), 2),
        "loss": first["loss"],
        "moved": first.get("moved", []),
        "normalisation": normalisation(first["normalisations"]),
        "range": _range_of_pictures(trained),
        "second_order": first["second_order"],
        "sends_neither": first["change"] == 0,
        "opacus": _private_optimisers(trained),
        "seconds": first["seconds"],
    }


def step_of(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe what one update is made of; None where no training was seen.

    Args:
        recipe: Of the clients' training.

    Returns:
        Steps, different examples (``pictures``), passes over them, the largest batch, and the optimiser.
    """
    if not recipe["trains"]:
        return None
    return {
        "steps": recipe["steps"], "pictures": recipe["examples"], "passes": recipe["passes"],
        "batch_size": recipe["batch_size"], "optimiser": recipe["optimiser"],
    }  # fmt: skip


def _parameter_groups(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the parameter groups of every optimiser of a client, each with how many steps it took by which rule."""
    return [
        {
            "optimiser": optimiser["name"],
            "is_known": optimiser["is_of_torch"],
            "is_new": optimiser["is_new"],
            "names": [name for name in names if name],
            "steps": [[count, rules[place]] for count, rules in optimiser["steps"]],
        }
        for optimiser in line["optimisers"]
        for place, names in enumerate(optimiser["groups"])
    ]


def _private_optimisers(trained: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List what every client's optimisers of Opacus state, with the sampling and the steps of one round."""
    stated = [
        {
            **optimiser,
            "steps": max(sum(count for count, _ in stepped["steps"]) for stepped in line["optimisers"]),
            "passes": line["passes"],
            "steps_on_batch": line["steps_on_batch"],
        }
        for line in trained
        for optimiser in line["opacus"]
    ]
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
    """Return mean and standard deviation of three channels, as attacks on pictures in [0, 1] take them.

    Pictures that are scaled otherwise before they are normalised, as to 0..255, are taken in the app's own range.

    Args:
        recipe: Of the clients' training.
    """
    mean, std = _stated_channels(recipe)
    low, high = recipe.get("range") or (0.0, 1.0)
    return [(value - low) / (high - low) for value in mean], [value / (high - low) for value in std]


def _stated_channels(recipe: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    stated = recipe.get("normalisation")
    if stated is None:
        return PLAIN
    mean, std = (values * 3 if len(values) == 1 else values for values in (stated["mean"], stated["std"]))
    return (mean, std) if len(mean) == len(std) == 3 else PLAIN


def _range_of_pictures(trained: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the app's own range of pictures before it normalises them: a usual one, else a round one around zero.

    Args:
        trained: What hooks saw of each training message.

    Returns:
        Lowest and highest value that a pixel may have; None where no pictures enter the network.
    """
    ranges = [line["range"] for line in trained if line["range"]]
    if not ranges:
        return None
    mean, std = _stated_channels({"normalisation": normalisation(trained[0]["normalisations"])})
    low = min(low * scale + centre for low, _ in ranges for centre, scale in zip(mean, std, strict=True))
    high = max(high * scale + centre for _, high in ranges for centre, scale in zip(mean, std, strict=True))
    for lowest, highest in RANGES:
        slack = SLACK * (highest - lowest)
        fits = lowest - slack <= low and high <= highest + slack
        if fits and (highest == 1 or high - low >= slack):  # values of a few units are no bytes
            return (lowest, highest)
    size = max(abs(low), abs(high))
    unit = 10.0 ** math.floor(math.log10(size))
    highest = math.ceil(size / unit) * unit
    return (0.0 if low >= -SLACK * highest else -highest, highest)


def threat_of(recipe: Mapping[str, Any], kind: str) -> ThreatModel:
    """Build what a server knows that wrote the app, of updates as ``as_one_group`` expresses them.

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
            # One step is of all pictures, however many passes its gradient added up.
            "local_batch_size": recipe["batch_size"] if steps > 1 and recipe["batch_size"] < examples else None,
        }
        if examples % (values["local_batch_size"] or 1):  # a last batch is smaller: the sum is what is known
            values["local_batch_size"] = 1
        moved = sum(_unrolled(_reference(recipe)).shares) if recipe["groups"] else 0.0
        if not _reads_adam(recipe) and moved:  # a solver without a rate moves by nobody knows how much
            values["local_learning_rate"] = moved / sum(ThreatModel.parse(values).unrolled.shares)
    return ThreatModel.parse(values)


def as_one_group(
    update: Mapping[str, Tensor], sent: Mapping[str, Tensor], recipe: Mapping[str, Any], *, factor: float = 1.0
) -> dict[str, Tensor]:
    """Express a change of weights as steps without weight decay by the rates of one parameter group would have made it.

    The server wrote the rules of all groups. SGD is linear in the first weights and the gradients, so decay is taken
    off and rates are evened out exactly; a single step of Adam moves each weight by a share of its group's rate.

    Args:
        update: Change of the weights, by the names of the network.
        sent: Weights that the server had sent, by the same names.
        recipe: Of the clients' training.
        factor: By which the change was made longer or shorter before it left.
    """
    if not recipe["groups"]:
        return dict(update)
    reference = _reference(recipe)
    share_of_reference, is_adam = sum(_unrolled(reference).shares), _reads_adam(recipe)
    first_rule = reference["steps"][0][1]
    decay = first_rule.get("lr", 0.0) * first_rule.get("weight_decay", 0.0) if recipe["optimiser"] == ADAMW else 0.0
    expressed = dict(update)
    for group in recipe["groups"]:
        if is_adam and group["steps"] == reference["steps"]:
            continue  # as it is, to its last digits
        kept, shares = _unrolled(group)
        for name in update.keys() & sent.keys() & set(group["names"]):
            change = without_decay(update[name], sent[name], 1 - factor * (1 - kept))
            change = change * (share_of_reference / sum(shares)) if sum(shares) else change
            expressed[name] = without_decay(change, sent[name], 1 + decay)
    return expressed


def _reference(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameter group in whose steps all are expressed: that of the smallest rate, which moves least."""
    groups: Sequence[Mapping[str, Any]] = recipe["groups"]
    return min(groups, key=lambda group: abs(sum(_unrolled(group).shares)))


def _unrolled(group: Mapping[str, Any]) -> UnrolledSgd:
    rules = [
        SgdRule(
            rule.get("lr", 0.0),
            rule.get("momentum", 0.0),
            rule.get("dampening", 0.0),
            bool(rule.get("nesterov")),
            rule.get("weight_decay", 0.0) if group["optimiser"] != "Adam" else 0.0,
        )
        for count, rule in group["steps"]
        for _ in range(count)
    ]
    return unroll_sgd(rules)


def optimiser_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a scenario about the optimiser; none for SGD, nor for those that no attack reads.

    Args:
        recipe: Of the clients' training.
    """
    if not _reads_adam(recipe):
        return {}
    decay = _reference(recipe)["steps"][0][1].get("weight_decay", 0.0)
    return {"local_optimiser": "adamw", "local_weight_decay": decay if recipe["optimiser"] == ADAMW else 0.0}


def _reads_adam(recipe: Mapping[str, Any]) -> bool:
    """Tell whether it is one step of AdamW, or of Adam without decay, by the epsilon that ``fedmjp.attacks`` know."""
    is_adam = recipe["optimiser"] == ADAMW or (recipe["optimiser"], recipe["weight_decay"]) == (ADAM, 0.0)
    return is_adam and (recipe["steps"], recipe["epsilon"]) == (1, EPSILON)


def unreadable(recipe: Mapping[str, Any], kind: str) -> str | None:
    """Explain why no equation is left in an update, whatever the attack; None if one is.

    Args:
        recipe: Of the clients' training.
        kind: Kind of the answers, such as weights or gradient.
    """
    if kind == "nothing":
        return "answers hold no arrays that could be read"
    if kind not in ("weights", "gradient"):
        return "what was sent has other names or shapes than the weights: nobody can say what it is of"
    return _no_gradients(recipe) if kind == "weights" else None


def departure_of(recipe: Mapping[str, Any]) -> str | None:
    """Explain how an update that can be read differs from the gradient of a loss of pictures; None if nothing is seen.

    Args:
        recipe: Of the clients' training.
    """
    if not recipe["second_order"]:
        return None
    return (
        "the update is no gradient of the loss alone: the client computed gradients of gradients, as a gradient "
        "penalty does, which attacks do not know"
    )


def _no_gradients(recipe: Mapping[str, Any]) -> str | None:
    """Explain why a change of weights is no sum of gradients, as far as the optimisers' rules tell; None if it is."""
    steps, optimiser, groups = recipe["steps"], recipe["optimiser"], recipe["groups"]
    if not steps:
        return "no optimiser took a step: the weights are those that the server sent"
    if not all(group["is_known"] for group in groups):
        return (
            f"the weights moved by {steps} steps of {optimiser}, which is not torch's: nobody can say what it computes"
        )
    if not all(group["is_new"] for group in groups) and (optimiser != SGD or recipe["momentum"]):
        return f"the update is no gradient of one round: its {optimiser} kept what it had added up in earlier rounds"
    if optimiser != SGD and not _reads_adam(recipe):
        return (
            f"the weights moved by {steps} steps of {optimiser}: the change is no sum of gradients, and no attack here "
            "solves for them"
        )
    shares = [_unrolled(group).shares for group in groups]
    if any(not _are_parallel(shares[0], group_shares) for group_shares in shares):
        return (
            "the update is no gradient of one step: its parameter groups weigh the gradients of the "
            f"{steps} steps differently, so their changes are of different sums"
        )
    return None


def _are_parallel(first: Sequence[float], second: Sequence[float]) -> bool:
    if len(first) != len(second):
        return False
    pairs = list(zip(first, second, strict=True))
    return all(abs(a * sum(second) - b * sum(first)) <= 1e-2 * abs(sum(first) * sum(second)) for a, b in pairs)
