"""Processes that train one model together: each reads and differentiates its part of every batch."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from fedmjp.data.loading import Part
from fedmjp.errors import TrainingError

# A process that waits for another one, which may be writing a checkpoint, ends after so long.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Together:
    """One of the processes of a run, all of which hold the same weights after every step.

    Parts are weighted by their pictures, so that some of them may be smaller, or empty.
    """

    number: int = 0  # from 0
    of: int = 1

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and speaks for all."""
        return self.number == 0

    @property
    def part(self) -> Part:
        """What it reads of every batch."""
        return Part(self.number, self.of)

    def average(self, parameters: Iterable[nn.Parameter], losses: Tensor, pictures: int) -> Tensor:
        """Turn the gradient of this part's mean loss into that of the whole batch's.

        A parameter that a batch does not use keeps no gradient, so that the optimiser leaves it alone, as in one
        process. A part with pictures knows which these are, without waiting for a GPU; an empty one reads it.

        Args:
            parameters: With the gradient.
            losses: (losses,) means of this part.
            pictures: In this part.

        Returns:
            (losses + 1,) their sums over the pictures of the batch, and the number of these.
        """
        sums = torch.cat([losses, losses.new_ones(1)]) * pictures
        if self.of == 1:
            return sums
        learnt = [parameter for parameter in parameters if parameter.requires_grad]
        used = [value.grad is not None for value in learnt]
        gradients = [torch.zeros_like(value) if value.grad is None else value.grad * pictures for value in learnt]
        flat = self.sum(torch.cat([*(gradient.flatten() for gradient in gradients), sums.new_tensor(used), sums]))
        sizes = [*(gradient.numel() for gradient in gradients), len(used), len(sums)]
        *gradients, users, sums = torch.split(flat, sizes)
        if not pictures:
            used = (users > 0).tolist()
        for parameter, gradient, learns in zip(learnt, gradients, used, strict=True):
            parameter.grad = (gradient / sums[-1]).view_as(parameter) if learns else None
        return sums

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, in place; TrainingError if one of them has ended."""
        if self.of > 1:
            with self.or_lost():
                distributed.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until all processes are here; TrainingError if one of them has ended."""
        if self.of > 1:
            with self.or_lost():
                distributed.barrier()

    @contextmanager
    def or_lost(self) -> Iterator[None]:
        """What fails within it fails because another process has ended."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]
            raise TrainingError(
                f"process {self.number} of {self.of} that train together lost the others, one of which ended: see "
                f"what that one said ({reason})"
            ) from None


ALONE = Together()


@contextmanager
def started_together(device: str) -> Iterator[Together]:
    """What ``torchrun`` started beside this process, each with a GPU of its own where the device is CUDA."""
    number, of = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if of == 1:
        yield ALONE
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with joined(Together(number, of), device) as together:
        yield together


@contextmanager
def joined(together: Together, device: str, meeting: str = "env://") -> Iterator[Together]:
    """Meet the other processes, for a while.

    Args:
        together: Which of them this is.
        device: Of their models.
        meeting: Where, as torch writes it.

    Raises:
        TrainingError: If they do not come.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    with together.or_lost():
        distributed.init_process_group(
            backend, init_method=meeting, rank=together.number, world_size=together.of, timeout=PATIENCE
        )
    try:
        yield together
    finally:
        distributed.destroy_process_group()
