"""What crossed the wire in a watched run, and what it is: weights, a change of them, a gradient, or something else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.tensors import are_weights

Kind = str  # "weights", "gradient", "unknown" or "nothing"


@dataclass(frozen=True)
class Answer:
    """A client's answer to one training message, of which arrays were kept."""

    message: str  # identifier of the training message, by which the evaluator knows what is behind it
    server_round: int
    node: int
    question_file: Path
    file: Path
    change: int | None = None  # 1 where arrays are the change of the weights, -1 where their sign is the opposite

    @property
    def sent(self) -> Mapping[str, Tensor]:
        """Return what the message held, of all its array records, by name."""
        return read_arrays(self.question_file)

    @property
    def arrays(self) -> Mapping[str, Tensor]:
        """Return what the answer holds, of all its array records, by name; a change as the weights that it leads to."""
        arrays = read_arrays(self.file)
        if self.change is None:
            return arrays
        sent = self.sent
        return {
            name: sent[name].double() + self.change * tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in arrays.items()
        }

    @cached_property
    def kind(self) -> Kind:
        """Tell the arrays' kind: weights, gradient, unknown or nothing."""
        arrays, sent = self.arrays, self.sent
        if not arrays:
            return "nothing"
        shared = {name: sent[name] for name in arrays if name in sent}
        if self.change is not None or are_weights(arrays, shared):
            return "weights"
        same = len(shared) == len(arrays) and all(arrays[name].shape == tensor.shape for name, tensor in shared.items())
        if not same:
            return "unknown"
        return "weights" if _holds_what_was_sent(arrays, shared) else "gradient"

    @property
    def update(self) -> dict[str, Tensor]:
        """Return the gradient, or the change of the weights."""
        floating = {name: tensor for name, tensor in self.arrays.items() if tensor.is_floating_point()}
        if self.kind != "weights":
            return dict(floating)
        sent = self.sent
        return {name: tensor.double().sub(sent[name].double()).float() for name, tensor in floating.items()}


def _holds_what_was_sent(arrays: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    """Tell whether an answer holds the sent weights about once, however much noise lies on them."""
    names = [name for name, tensor in arrays.items() if tensor.is_floating_point()]
    length = math.fsum(float(sent[name].double().square().sum()) for name in names)
    along = math.fsum(float((arrays[name].double() * sent[name].double()).sum()) for name in names)
    return length > 0 and abs(along / length - 1) < 0.5


def read_answers(records: Records) -> list[Answer]:
    """Read every answer of which arrays were kept, in the order in which they came.

    Args:
        records: Folders of the watched run.
    """
    sent = {line["id"]: line for line in records.wire() if line["way"] == "down"}
    changes = {line["id"]: line.get("change") or None for line in lines(records.evaluator / "seen.jsonl")}
    answers = []
    for line in records.wire():
        question = sent.get(line.get("reply_to", ""))
        if line["way"] == "up" and "file" in line and question is not None and "file" in question:
            files = (records.server / question["file"], records.server / line["file"])
            answer = Answer(question["id"], int(question["round"]), int(line["node"]), *files)
            change = (
                None
                if answer.kind == "weights" or not answer.arrays.keys() <= answer.sent.keys()
                else changes.get(answer.message)
            )
            answers.append(replace(answer, change=change))
    return answers


@lru_cache(maxsize=2)
def read_arrays(path: Path) -> Mapping[str, Tensor]:
    """Read tensors by their own names; records that hold the same names keep theirs before them.

    Args:
        path: Of the file.
    """
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if file[key].dtype.kind in "fiub"}
    short = [key.partition("/")[2] for key in arrays]
    keys = short if len(set(short)) == len(short) else list(arrays)
    return {key: torch.from_numpy(np.array(array)) for key, array in zip(keys, arrays.values(), strict=True)}


def leaves(records: Records, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """List what leaves a client, an entry for each name in each record, in the order of first sight.

    Args:
        records: Folders of the watched run.
        answers: Of which arrays were kept.
    """
    kinds = {
        (answer.server_round, answer.node): "change of the weights" if answer.change else answer.kind
        for answer in answers
    }
    entries: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in records.wire():
        if line["way"] != "up":
            continue
        kind = kinds.get((int(line["round"]), int(line["node"])))
        for record, described in line.get("records", {}).items():
            for entry in _entries(described, kind if line["type"].startswith("train") else None):
                key = (line["type"], record, entry["name"])
                counted = entries.setdefault(key, {"message": line["type"], "record": record, **entry, "times": 0})
                counted["times"] += 1
    return list(entries.values())


def _entries(described: Mapping[str, Any], kind: Kind | None) -> list[dict[str, Any]]:
    if described["kind"] == "arrays":
        return [
            {"name": name, "what": kind or "arrays", "dtype": dtype, "shape": shape, "bytes": size}
            for name, (dtype, shape, size) in described["entries"].items()
        ]
    meaning = "metric in clear" if described["kind"] == "metrics" else "configuration in clear"
    return [
        {"name": name, "what": meaning, "dtype": type(value).__name__, "bytes": _size(value), "example": _short(value)}
        for name, value in described["values"].items()
    ]


def _size(value: Any) -> int:
    if isinstance(value, Mapping):
        return len(value["bytes"]) * 3 // 4
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 8


def _short(value: Any) -> Any:
    if isinstance(value, int | float | bool):
        return value
    text = f"{len(value)} values" if isinstance(value, list) else "bytes" if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def server_controls(records: Records, recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what the server chooses of a client's work: weights, and values, some of them seen in the recipe.

    Args:
        records: Folders of the watched run.
        recipe: Of the clients' training.
    """
    controls: dict[str, dict[str, Any]] = {}
    rate = recipe.get("learning_rate")
    for line in records.wire():
        if line["way"] != "down":
            continue
        for record, described in line.get("records", {}).items():
            if described["kind"] == "arrays":
                size = sum(entry[2] for entry in described["entries"].values())
                meaning = (
                    f"{len(described['entries'])} tensors, {size:,} bytes: a client computes with whatever is sent"
                )
                controls.setdefault(record, {"name": record, "what": "weights", "meaning": meaning})
                continue
            for stated, value in described["values"].items():
                name = "(a value for each client)" if stated.isdigit() else stated
                meaning = "values that the app's client may read"
                if isinstance(value, int | float) and rate is not None and abs(float(value) - rate) <= 1e-6 * rate:
                    meaning = "the learning rate that clients train with: the server's to choose"
                controls.setdefault(
                    f"{record}.{name}",
                    {"name": f"{record}.{name}", "what": "configuration", "value": _short(value), "meaning": meaning},
                )
    code = "whoever may submit a run sends the code that clients run"
    return [*controls.values(), {"name": "app bundle", "what": "code", "meaning": code}]
