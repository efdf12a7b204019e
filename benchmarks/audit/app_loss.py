"""The app's own loss of single examples, computed again as hooks saw it, at any weights of its network."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedmjp.benchmarks.audit.evaluating import read_batches
from fedmjp.benchmarks.audit.probe.losses import LINKS, digest, main_input, named_tensors
from fedmjp.errors import BadInputError

CLASSIFICATION = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy")
CHUNK = 32  # examples that go through the network together
CHUNK_ENTRIES = 20_000_000  # of the gradients that are computed together
MOST_TRAINED = 2_000_000  # parameters, the last ones, of which an example's gradient is taken
MOST_ENTRIES = 60_000_000  # of all gradients together


@dataclass(frozen=True)
class Examples:
    """Examples as they entered a network, with what its loss compared the outputs with."""

    inputs: Mapping[str, Tensor]  # (n, ...) each, by their place in the call
    target: Tensor  # (n, ...)

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, places: Any) -> "Examples":
        return Examples({name: tensor[places] for name, tensor in self.inputs.items()}, self.target[places])

    @cached_property
    def digests(self) -> list[bytes]:
        """Return a digest of each example's main input."""
        examples = main_input(self.inputs)
        return [] if examples is None else [digest(example) for example in examples]

    def distinct(self, excluded: set[bytes]) -> "Examples":
        """Drop examples that are excluded, or that stand before.

        Args:
            excluded: Digests.
        """
        first = {key: place for place, key in reversed(list(enumerate(self.digests)))}
        return self[[place for key, place in sorted(first.items(), key=lambda pair: pair[1]) if key not in excluded]]


def joined(parts: Sequence[Examples]) -> Examples:
    """Join examples of one shape; those of another shape than the first are left out.

    Args:
        parts: At least one.
    """
    shapes = [({n: t.shape[1:] for n, t in part.inputs.items()}, part.target.shape[1:]) for part in parts]
    uniform = [part for part, shape in zip(parts, shapes, strict=True) if shape == shapes[0]]
    inputs = {name: torch.cat([part.inputs[name] for part in uniform]) for name in parts[0].inputs}
    return Examples(inputs, torch.cat([part.target for part in uniform]))


def read_examples(path: Path) -> Examples | None:
    """Read the examples of a file of batches that hooks kept; None without any that has a target.

    Args:
        path: Of the file, which may be missing.
    """
    parts = [part for batch in read_batches(path) if (part := _examples(batch)) is not None]
    return joined(parts) if parts else None


def _examples(batch: Mapping[str, Tensor]) -> Examples | None:
    """Take a batch apart; a target with several rows for each example gets a dimension for them."""
    tensors = {name: tensor for name, tensor in batch.items() if name != "target"}
    examples, target = main_input(tensors), batch.get("target")
    if examples is None or target is None or not len(examples) or not target.ndim or len(target) % len(examples):
        return None
    count = len(examples)
    target = target if len(target) == count else target.reshape(count, -1, *target.shape[1:])
    return Examples({name: tensor for name, tensor in tensors.items() if tensor.ndim and len(tensor) == count}, target)


class AppLoss:
    """The loss of an app's network, for each example alone; the network is in evaluation mode.

    Args:
        module: The app's.
        loss: As the hooks described it.

    Raises:
        BadInputError: If the loss cannot be computed from what hooks saw of it.
    """

    def __init__(self, module: nn.Module, loss: Mapping[str, Any]) -> None:
        if not loss:
            raise BadInputError("no loss of torch.nn.functional was seen, so it cannot be computed again")
        if not loss.get("link"):
            raise BadInputError(
                f"the app computes {loss['name']} of something else than its network's output, in a way that is unknown"
            )
        self.module, self._loss = module, loss
        self._trained = {n: p for n, p in module.named_parameters() if p.is_floating_point()}

    def losses(self, examples: Examples, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Compute the loss (n,) of each example, float64.

        Args:
            examples: n of them.
            weights: Of the network by name; what is missing is as the server sent it.

        Raises:
            BadInputError: If the network does not take the examples.
        """
        with torch.no_grad():
            parts = [
                self._losses(examples[place : place + CHUNK], weights or {}) for place in range(0, len(examples), CHUNK)
            ]
        return torch.cat(parts).double()

    def of_batch(self, examples: Examples) -> Tensor:
        """Compute the loss (n,) of each example of a batch at the network's own weights, to be differentiated.

        Args:
            examples: n of them.

        Raises:
            BadInputError: If the network does not take the examples.
        """
        return self._losses(examples, {})

    def gradient(self, examples: Examples, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Compute the gradient of the examples' mean loss at the weights that the server sent, by name.

        Args:
            examples: At least one.
            names: Parameters; None for all.

        Raises:
            BadInputError: If the network does not take the examples.
        """
        leaves = {name: self._trained[name].detach().requires_grad_() for name in names or self._trained}
        total = self._losses(examples, leaves).mean()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }

    @property
    def is_of_classes(self) -> bool:
        """Tell whether the loss compares with classes, not with numbers."""
        return self._loss["name"] in CLASSIFICATION

    def gradients(self, examples: Examples, names: Sequence[str], *, stride: int, seconds: float) -> Tensor:
        """Compute gradients (up to n, entries), one for each example, as many as time allows; see ``entries``.

        Args:
            examples: n of them.
            names: Parameters, of ``last_trained``.
            stride: Of the entries that are kept.
            seconds: Of the processors.

        Raises:
            BadInputError: If the network does not take the examples.
        """
        started, parts = time.process_time(), list[Tensor]()
        size = max(1, min(CHUNK, CHUNK_ENTRIES // max(sum(self._trained[name].numel() for name in names), 1)))
        while (place := sum(map(len, parts))) < len(examples) and time.process_time() - started <= seconds:
            chunk = examples[place : place + size]
            try:
                gradients = self._gradients_of_chunk(chunk, names) if size > 1 else self.gradient(chunk, names)
            except (RuntimeError, BadInputError):  # of a network that looks at values, or keeps them
                if size == 1:
                    raise
                size = 1
                continue
            rows = torch.cat([gradients[name].detach().reshape(len(chunk), -1).float() for name in names], 1)
            parts.append(rows[:, ::stride].clone())
        return torch.cat(parts)

    def _gradients_of_chunk(self, examples: Examples, names: Sequence[str]) -> dict[str, Tensor]:
        """Compute gradients (n, ...) of several examples at once, by name."""
        weights = {name: self._trained[name].detach() for name in names}

        def loss_of(values: dict[str, Tensor], inputs: dict[str, Tensor], target: Tensor) -> Tensor:
            single = Examples({name: tensor[None] for name, tensor in inputs.items()}, target[None])
            return self._losses(single, values).mean()

        gradients: dict[str, Tensor] = vmap(grad(loss_of), in_dims=(None, 0, 0))(
            weights, dict(examples.inputs), examples.target
        )
        return gradients

    def last_trained(self, update: Mapping[str, Tensor], examples: int) -> tuple[list[str], int]:
        """Name the last parameters that an update moves, and the stride at which entries of all examples fit memory.

        Args:
            update: By the names of the network.
            examples: Number of them.
        """
        moved = [name for name in self._trained if name in update and bool(update[name].any())]
        total = 0
        names: list[str] = []
        for name in reversed(moved):
            if names and total + self._trained[name].numel() > MOST_TRAINED:
                break
            total += self._trained[name].numel()
            names.append(name)
        return names[::-1], -(-total * examples // MOST_ENTRIES)

    def _losses(self, examples: Examples, weights: Mapping[str, Tensor]) -> Tensor:
        outputs = dict(named_tensors(self._call(examples.inputs, weights), "output"))
        link = self._loss["link"]
        if link["output"] not in outputs:
            raise BadInputError("the network returns something else for these examples than in training")
        count, target = len(examples), examples.target
        values, trailing = LINKS[link["link"]](outputs[link["output"]].float()), self._loss["shape"][1:]
        rows = values.reshape(-1, *trailing)
        target = target if len(rows) == count else target.reshape(len(rows), *target.shape[2:])
        options = {
            name: torch.tensor(value) if isinstance(value, list) or name.endswith("weight") else value
            for name, value in self._loss["options"].items()
        }
        try:
            losses: Tensor = getattr(F, self._loss["name"])(rows, target, reduction="none", **options)
        except (RuntimeError, ValueError, TypeError) as error:
            raise BadInputError(f"the app's loss cannot be computed again: {str(error).splitlines()[0]}") from error
        return losses.reshape(count, -1).mean(1)

    def _call(self, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Any:
        """Call the network as the app did, with tensors where they stood in its call."""
        problem = "it was called without tensors"
        for arguments, keywords in _calls(inputs):
            try:
                return functional_call(self.module, dict(weights), arguments, keywords)
            except Exception as error:  # noqa: BLE001 (somebody else's module)
                problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInputError(f"the app's network cannot be called outside of it: {problem}")


def _calls(inputs: Mapping[str, Tensor]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """List the calls that may have had these tensors: a mapping that stands last may be keywords."""
    places: dict[str, Any] = {}
    for name, tensor in inputs.items():
        _, place, *key = name.split("-", 2)
        if key:
            places.setdefault(place, {})[key[0]] = tensor
        else:
            places[place] = tensor
    values = [
        list(value.values()) if isinstance(value, dict) and all(key.isdigit() for key in value) else value
        for value in places.values()
    ]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(tuple(values), {})]
    if values and isinstance(values[-1], dict):
        calls.insert(0, (tuple(values[:-1]), values[-1]))
    return calls


def entries(tensors: Mapping[str, Tensor], names: Sequence[str], stride: int) -> Tensor:
    """Flatten tensors to float32 and keep one of so many entries.

    Args:
        tensors: By name.
        names: That are taken, in order.
        stride: Distance between the entries that are kept.
    """
    return torch.cat([tensors[name].detach().flatten().float() for name in names])[::stride].clone()
