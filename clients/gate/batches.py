"""One pass of a batch through a network: its rows, and how much of the loss' gradient each of them has."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

SEQUENCE_FIRST = (nn.RNNBase, nn.MultiheadAttention)  # with batch_first=False, rows are along the second dimension


def is_batch(tensor: Tensor) -> bool:
    """Tell whether a tensor that enters a module may be a batch: data, of at least one dimension.

    Args:
        tensor: First argument of the module.
    """
    least = 2 if tensor.is_floating_point() else 1
    return tensor.ndim >= least and tensor.numel() > 0 and not tensor.requires_grad and not tensor.is_complex()


class Pass:
    """A call of an outermost module.

    Args:
        batch: What entered, rows along the first dimension until ``end`` knows better.
    """

    def __init__(self, batch: Tensor) -> None:
        self.batch, self.rows = batch.detach(), len(batch)
        self.module: nn.Module | None = None
        self.images: Tensor | None = None
        self.labels: Tensor | None = None
        self.features: Tensor | None = None  # what the last Linear read (rows, features)
        self._dimension: int | None = 0  # of rows; None where rows cannot be told apart
        self._sequences = 0  # rows that a layer with sequences first has read
        self._output: Tensor | None = None  # of the last module that gave one row for each row
        self._digests: list[bytes] = []
        self._gradients: Tensor | None = None  # norms (rows,)
        self._marked: list[float] = []

    def enter(self, module: nn.Module, tensor: Tensor) -> None:
        """Note what a module within the call reads.

        Args:
            module: The module.
            tensor: Its first argument.
        """
        if isinstance(module, nn.Linear) and tensor.ndim == 2 and len(tensor) == self.rows:
            self.features = tensor.detach()
        if isinstance(module, SEQUENCE_FIRST) and tensor.ndim == 3 and not module.batch_first:
            self._sequences = tensor.shape[1]

    def leave(self, output: object) -> None:
        """Note what a module within the call gives.

        Args:
            output: Of the module.
        """
        if isinstance(output, Tensor) and output.requires_grad and output.ndim and len(output) == self.rows:
            self._output = output

    def end(self, module: nn.Module, output: object, *, hashing: bool) -> list[Tensor]:
        """End the call: tell its rows apart.

        Args:
            module: The outermost.
            output: What it gives.
            hashing: Whether digests of the rows are wanted.

        Returns:
            Tensors whose gradients say which rows a loss is of; none where nothing can be trained.
        """
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if outputs:
            self.module = module
            self.rows, self._dimension = self._find_rows(outputs)
            by_row = [tensor for tensor in outputs if self._is_by_row(tensor)]
            outputs = by_row or ([self._output] if self._output is not None else outputs)
            if hashing:
                self._digests = list(self._hash())
        self._output = None
        return outputs

    def keep(self, wanted: bool) -> None:
        """Keep the rows and their features, where a network takes rows as the first dimension of a batch.

        Args:
            wanted: Whether to keep them.
        """
        storable = wanted and self._dimension == 0
        self.images = self.batch.clone() if storable else None
        self.features = self.features.clone() if storable and self.features is not None else None

    def parameters(self) -> set[int]:
        """Identify what is trained."""
        return {id(parameter) for parameter in self._trained()}

    def add_gradient(self, gradient: Tensor) -> None:
        """Note the gradient of an output; what is no number counts as nothing.

        Args:
            gradient: Rows along the first dimension, or of anything that all rows take part in.
        """
        gradient = gradient.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)
        if self._is_by_row(gradient):
            norms = gradient.reshape(self.rows, -1).norm(dim=1)
        else:
            norms = gradient.norm().expand(self.rows)
        self._gradients = norms if self._gradients is None else torch.maximum(self._gradients, norms)
        self.batch = torch.empty(0)  # was hashed and kept; nobody needs it any longer

    @property
    def largest(self) -> float:
        """Return the largest norm of a row's gradient."""
        return 0.0 if self._gradients is None else float(self._gradients.max())

    def rows_above(self, least: float) -> Tensor:
        """Mark the rows whose gradient is not zero and has at least a norm (rows,).

        Args:
            least: The norm.
        """
        if self._gradients is None:
            return torch.zeros(self.rows, dtype=torch.bool)
        return (self._gradients > 0) & (self._gradients >= least)

    def digests_above(self, least: float) -> Iterator[bytes]:
        """Yield the digests of such rows.

        Args:
            least: The norm.
        """
        yield from (digest for digest, used in zip(self._digests, self.rows_above(least), strict=False) if used)

    def is_cleared(self) -> bool:
        """Tell whether no gradient is in place."""
        return not any(part.grad is not None and bool(part.grad.any()) for part in self._trained())

    def mark_weights(self) -> None:
        """Remember the lengths of the weights."""
        self._marked = self._lengths()

    def has_moved(self) -> bool:
        """Tell whether the weights changed since they were marked."""
        return self._marked != self._lengths()

    def _trained(self) -> Iterator[nn.Parameter]:
        if self.module is not None:
            yield from (part for part in self.module.parameters() if part.requires_grad)

    def _lengths(self) -> list[float]:
        """Return the lengths of the weights, which any step changes."""
        return [float(part.detach().double().norm()) for part in self._trained()]

    def _is_by_row(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and len(tensor) > 0 and len(tensor) % self.rows == 0

    def _find_rows(self, outputs: list[Tensor]) -> tuple[int, int | None]:
        """Find how many rows a batch has, and along which of its dimensions."""
        shape = self.batch.shape
        if self._sequences and shape[0] != self._sequences:
            return self._sequences, 1 if self.batch.ndim > 1 and shape[1] == self._sequences else None
        count = next((len(tensor) for tensor in outputs if tensor.ndim), shape[0])
        if self._sequences or count % shape[0] == 0 or not count:
            return shape[0], 0
        if self.batch.ndim > 1 and count == shape[1]:
            return count, 1
        return count, None

    def _hash(self) -> Iterator[bytes]:
        values = self.batch.cpu()
        if self._dimension is None:
            whole = _digest(values)
            yield from (whole + index.to_bytes(8) for index in range(self.rows))
        else:
            yield from (_digest(row) for row in values.movedim(self._dimension, 0))


def _digest(tensor: Tensor) -> bytes:
    values = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(values.data, digest_size=16).digest()


def _tensors(output: object) -> Iterator[Tensor]:
    """Yield the tensors in what a module returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)
