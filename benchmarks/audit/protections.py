"""Protections that an app has, as two looks show them: at what was trained and what left, and at Opacus' noise."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.audit.network import by_name
from benchmarks.audit.running import Records
from benchmarks.audit.wire import Answer
from fedmjp.defences.accounting import composed_epsilon

EQUAL = 1e-6  # relative difference that rounding leaves
DELTA = 1e-5
ROUNDS = (1, 10, 100)
TOLERANCE = 0.15  # by which measured noise may differ from what is stated


def verify(records: Records, recipe: Mapping[str, Any], answers: Sequence[Answer], module: Any) -> list[str]:
    """Sentences about protections, each with what it was measured on.

    Args:
        records: Of the run.
        recipe: That was seen.
        answers: Of which arrays were kept.
        module: The app's network, for the names of what was trained; None where there is none.
    """
    sentences = _opacus(recipe)
    compared = [_compare(answer, records.evaluator, module) for answer in answers if answer.kind == "weights"]
    sentences += list(dict.fromkeys(filter(None, compared)))
    if _masked(records):
        sentences.append(
            "Answers hold bytes and no weights, as of secure aggregation. That masks cancel in the sum, and that the "
            "server cannot unmask one client, was not tested; metrics beside them leave in clear."
        )
    stated = sorted({name for line in records.wire() for name in _metrics(line) if "epsilon" in name.lower()})
    if stated:
        sentences.append(f"The app reports {', '.join(stated)} in clear, of one round; rounds add up.")
    return sentences


def _metrics(line: Mapping[str, Any]) -> list[str]:
    described = line.get("records", {}).values()
    return [name for one in described if one["kind"] == "metrics" for name in one["values"]]


def _masked(records: Records) -> bool:
    answers = [line for line in records.wire() if line["way"] == "up" and line["type"].startswith("train")]
    return any(
        isinstance(value, list) and value and isinstance(value[0], Mapping)
        for line in answers
        for one in line.get("records", {}).values()
        if one["kind"] == "config"
        for value in one["values"].values()
    )


def _compare(answer: Answer, folder: Path, module: Any) -> str | None:
    """What was done to weights between the last step and the wire."""
    path = folder / f"{answer.message}-trained.npz"
    if not path.exists():
        return None
    with np.load(path) as file:
        trained = {name: torch.from_numpy(file[name]) for name in file.files}
    left, sent = (by_name(module, arrays) if module is not None else arrays for arrays in (answer.arrays, answer.sent))
    names = [name for name in left if name in trained and name in sent and left[name].is_floating_point()]
    if not names:
        return None
    update, reply = (_joined(state, sent, names) for state in (trained, left))
    if not bool(update.any()):
        return "Nothing was trained: the weights that left are those that came."
    rest = reply - update
    if float(rest.norm()) <= EQUAL * max(float(reply.norm()), float(_flat(sent, names).norm())):
        return "What leaves is what was trained, to the last digits: nothing is done to it before it leaves."
    factor = float((reply @ update) / (update @ update))
    noise = reply - factor * update
    share = float(noise.norm() / (abs(factor) * update.norm())) if factor else math.inf
    if share <= 1e-3:
        return f"The update was scaled by {factor:.3g} before it left, as clipping does; no noise was added."
    return (
        f"The update was scaled by {factor:.3g} and something was added to it before it left: standard deviation "
        f"{float(noise.std()):.3g}, {share:.2g} times the update itself."
    )


def _joined(state: Mapping[str, Tensor], sent: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return _flat(state, names) - _flat(sent, names)


def _flat(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([state[name].double().flatten() for name in names])


def _opacus(recipe: Mapping[str, Any]) -> list[str]:
    if not recipe.get("opacus"):
        return []
    stated = recipe["opacus"][0]
    multiplier, norm = float(stated["noise_multiplier"]), float(stated["max_grad_norm"])
    measured, expected = stated["measured_noise"], multiplier * norm
    sentences = [
        f"Opacus: gradients of single examples clipped to {norm:g}, noise multiplier {multiplier:g}, as it states."
    ]
    if measured is None:
        sentences.append("How much noise was added could not be measured.")
    elif abs(measured - expected) <= TOLERANCE * expected:
        sentences.append(
            f"Verified: noise of standard deviation {measured:.3g} was added to a sum, {expected:.3g} stated."
        )
    else:
        sentences.append(f"Not as stated: noise of standard deviation {measured:.3g} was added, {expected:.3g} stated.")
    steps, batch = int(recipe["steps"]), float(stated["expected_batch_size"] or 1)
    rate = min(1.0, 1.0 / steps) if steps else 1.0
    if multiplier > 0:
        spent = ", ".join(
            f"{composed_epsilon(multiplier, DELTA, max(steps, 1) * rounds, rate):.3g} after {rounds}"
            for rounds in ROUNDS
        )
        sentences.append(
            f"Epsilon for one example at delta {DELTA:g}, composed over rounds of {max(steps, 1)} steps of "
            f"{batch:g} examples, as seen here: {spent}."
        )
    return sentences
