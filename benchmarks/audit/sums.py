"""Whether a secure sum is one: the next weights against every client's own update, and every message against its own.

The evaluator knows each client's update from hooks. A sum holds several of them; a masked message runs parallel to
none of the numbers that it hides, and its integers are spread evenly over a modulus. The server gets the sum all the
same: it is attacked as one upload of all clients together. How masks are drawn is not tested: Flower's SecAgg+ takes
each from a generator with a seed of 32 bits, which whoever tries all seeds may find.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from fedmjp.benchmarks.audit.evaluating import read_batches, read_trained
from fedmjp.benchmarks.audit.network import by_name
from fedmjp.benchmarks.audit.noise import flat
from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.benchmarks.audit.verbatim import Vector, strongest_window, vectors
from fedmjp.benchmarks.audit.wire import Answer, read_arrays

ENTRIES = 2_000_000  # of all updates together that a sum is fitted on
WINDOW = 4096  # numbers of a client's own that are looked for in its messages
TAKES_PART = 0.1  # of the largest share, from which on a client is in a sum
BINS = 16  # of the modulus, over which masked integers are spread
FEWEST_MASKED = 1000  # integers of one upload that show how they are spread
UNEVEN = 1e-6  # p value below which they are spread unevenly
SUM = "sum"  # in place of a message's identifier: the sum of what clients trained in the first round
BEYOND_DOUBT = 4.0  # standard errors


@dataclass(frozen=True)
class Sum:
    """What the next weights are of clients' updates."""

    shares: tuple[float, ...]  # factor of each client's update
    errors: tuple[float, ...]  # standard error of each
    deviation: float  # standard deviation, in one number, of what is no multiple of them
    residual: float  # its length, relative to the whole

    @property
    def takes_part(self) -> tuple[float, ...]:
        """List shares of the clients that are in it beyond doubt."""
        largest = max(map(abs, self.shares))
        pairs = zip(self.shares, self.errors, strict=True)
        return tuple(share for share, error in pairs if abs(share) > max(BEYOND_DOUBT * error, TAKES_PART * largest))


@dataclass(frozen=True)
class ClientTraining:
    """One client's training of one round."""

    message: str
    node: int
    weights: Mapping[str, Tensor]


def read_round(records: Records) -> tuple[Mapping[str, Tensor], list[ClientTraining], Mapping[str, Tensor]] | None:
    """Read the first round's weights, clients' trained ones and the next weights; None without a next round.

    Args:
        records: Folders of the watched run.
    """
    questions = [line for line in records.wire() if line["way"] == "down" and _holds_arrays(line)]
    rounds = sorted({int(line["round"]) for line in questions})
    if len(rounds) < 2:
        return None
    files = [
        next((line["file"] for line in questions if line["round"] == number and "file" in line), None)
        for number in rounds
    ]
    if files[0] is None or files[1] is None:
        return None
    first = [line for line in questions if line["round"] == rounds[0]]
    trained = [
        ClientTraining(line["id"], int(line["node"]), read_trained(records.evaluator, line["id"])) for line in first
    ]
    trained = [training for training in trained if training.weights]
    if not trained:
        return None
    first_weights, next_weights = (
        by_name(trained[0].weights, read_arrays(records.server / str(file))) for file in files[:2]
    )
    return first_weights, trained, next_weights


def _holds_arrays(line: Mapping[str, Any]) -> bool:
    described = line.get("records", {}).values()
    return line["type"].partition(".")[0] == "train" and any(
        description["kind"] == "arrays" for description in described
    )


def read_sum(records: Records) -> tuple[Records, Answer, int] | None:
    """Take the sum that a server gets of masked uploads for one upload of all clients together; None without one.

    Args:
        records: Folders of the watched run; the evaluator's knowledge of the sum is written beside them.

    Returns:
        Folders that know what is behind the sum, the sum, whose arrays are the next weights, and its number of clients.
    """
    round_seen = read_round(records)
    if round_seen is None or len(round_seen[1]) < 2:
        return None
    trained = round_seen[1]
    files = {
        int(line["round"]): line["file"] for line in reversed(records.wire()) if _holds_arrays(line) and "file" in line
    }
    first_file, next_file = (records.server / str(files[number]) for number in sorted(files)[:2])
    watched = {line["id"]: line for line in lines(records.evaluator / "seen.jsonl")}
    entries = [watched[training.message] for training in trained]
    whole = Records(records.root / SUM)
    whole.evaluator.mkdir(parents=True, exist_ok=True)
    for name in ("server", "model", "app"):
        if not (whole.root / name).exists():
            (whole.root / name).symlink_to(records.root / name)
    for path in (*records.evaluator.glob("evaluated-*.npz"), records.evaluator / "stand-ins.jsonl"):
        if path.exists() and not (whole.evaluator / path.name).exists():
            (whole.evaluator / path.name).symlink_to(path)
    batches = [list(read_batches(records.evaluator / f"{training.message}.npz")) for training in trained]
    np.savez(whole.evaluator / f"{SUM}.npz", **_joined(batches))
    digests = [np.load(records.evaluator / f"{training.message}-entered.npy") for training in trained]
    np.save(whole.evaluator / f"{SUM}-entered.npy", np.concatenate(digests))
    examples = [int(entry["examples"]) for entry in entries]
    mean: dict[str, Any] = {
        name: sum(
            count / sum(examples) * training.weights[name].double().numpy()
            for count, training in zip(examples, trained, strict=True)
        )
        for name in trained[0].weights
    }
    np.savez(whole.evaluator / f"{SUM}-trained.npz", **mean)
    line = {
        **entries[0],
        "id": SUM,
        "node": trained[0].node,
        "sizes": [sum(sizes) for sizes in zip_longest(*(entry["sizes"] for entry in entries), fillvalue=0)],
        "examples": sum(examples),
        "labels": sum((Counter(entry["labels"]) for entry in entries), Counter()),
    }
    (whole.evaluator / "seen.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    return whole, Answer(SUM, 1, trained[0].node, first_file, next_file), len(trained)


def _joined(clients: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Any]:
    """Join the batches of clients step by step, as files hold them; a tensor that a client lacks is left out."""
    arrays: dict[str, Any] = {}
    for place, batches in enumerate(zip_longest(*clients, fillvalue={})):
        present = [batch for batch in batches if batch]
        for name in set.intersection(*(set(batch) for batch in present)):
            arrays[f"{place}/{name}"] = torch.cat([batch[name] for batch in present]).numpy()
    return arrays


def spread_of_masks(records: Records) -> float | None:
    """Compute the least p value of uploads whose integers are even over their modulus; None where none holds integers.

    The modulus is the one that the server names, else the next power of two.

    Args:
        records: Folders of the watched run.
    """
    values, moduli = list[float](), list[int]()
    for line in records.wire():
        for described in line.get("records", {}).values() if line["way"] == "down" else ():
            moduli += [int(value) for name, value in described.get("values", {}).items() if name == "mod_range"]
        for sent in _sent(line) if line["way"] == "up" and line["type"].startswith("train") else ():
            is_whole = len(sent) >= FEWEST_MASKED and bool((sent == np.round(sent)).all()) and sent.max() > 2**16
            if is_whole and sent.min() >= 0:
                modulus = max([*moduli, 0]) or 2 ** math.ceil(math.log2(float(sent.max()) + 1))
                counts = np.histogram(sent, BINS, (0, modulus))[0]
                values.append(float(chisquare(counts).pvalue))
    return min(1.0, min(values) * len(values)) if values else None


def fit_sum(
    first_weights: Mapping[str, Tensor], trained: Sequence[ClientTraining], next_weights: Mapping[str, Tensor]
) -> Sum | None:
    """Fit the change of the weights as a sum of multiples of clients' updates; None where there is no change.

    Args:
        first_weights: That the round began with.
        trained: What each client trained.
        next_weights: After the round.
    """
    names = [name for name, tensor in first_weights.items() if tensor.is_floating_point() and name in next_weights]
    start = flat(first_weights, names)
    step = max(1, len(start) * len(trained) // ENTRIES)
    updates = torch.stack([flat(training.weights, names)[::step] - start[::step] for training in trained], dim=1)
    change = (flat(next_weights, names) - start)[::step]
    if not bool(change.any()) or not bool(updates.any()):
        return None
    shares = torch.linalg.lstsq(updates, change[:, None], driver="gelsd").solution[:, 0]
    residual = change - updates @ shares
    deviation = float(residual.norm()) / math.sqrt(max(len(residual) - len(shares), 1))
    errors = deviation * torch.linalg.pinv(updates.mT @ updates, hermitian=True).diagonal().clamp_min(0).sqrt()
    return Sum(tuple(shares.tolist()), tuple(errors.tolist()), deviation, float(residual.norm() / change.norm()))


def strongest_correlation(
    records: Records, first_weights: Mapping[str, Tensor], trained: Sequence[ClientTraining]
) -> float:
    """Find the strongest correlation of a client's answers with its own update or weights, whatever the scale.

    Args:
        records: Folders of the watched run.
        first_weights: That the round began with.
        trained: What each client trained.
    """
    by_node = {training.node: training for training in trained}
    strongest = 0.0
    for line in records.wire():
        training = by_node.get(int(line["node"])) if line["way"] == "up" else None
        if training is None:
            continue
        hidden = list(_hidden(first_weights, training.weights))
        for sent in _sent(line):
            strongest = max(
                strongest, *(strongest_window(sent, numbers) for numbers in hidden if len(sent) >= len(numbers)), 0.0
            )
    return strongest


def _hidden(first_weights: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Iterator[Vector]:
    """Yield the first numbers of the largest tensor that was trained: its update, and its weights."""
    name = max(
        (name for name, tensor in weights.items() if tensor.is_floating_point()), key=lambda key: weights[key].numel()
    )
    for tensor in (weights[name].double() - first_weights[name].double(), weights[name].double()):
        yield tensor.flatten()[:WINDOW].numpy()


def _sent(line: Mapping[str, Any]) -> Iterator[Vector]:
    """Yield every value of an answer as numbers; the parts of a list also one after another."""
    for described in line.get("records", {}).values():
        for value in described.get("values", {}).values():
            yield from vectors(value)
            if isinstance(value, list) and value and isinstance(value[0], Mapping):
                firsts = [next(islice(vectors(part), 1), None) for part in value]
                yield np.concatenate([first for first in firsts if first is not None])
