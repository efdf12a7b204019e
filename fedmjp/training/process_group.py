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
class ProcessGroup:
    """A process of a run among those that train the same model, which all hold the same weights after every step.

    Parts are weighted by their pictures, so that some of them may be smaller, or empty.
    """

    number: int = 0  # from 0
    of: int = 1

    @property
    def first(self) -> bool:
        """Tell whether this process writes and prints for all."""
        return self.number == 0

    @property
    def part(self) -> Part:
        """Return the part of every batch that this process reads."""
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
        """Add a tensor up over all processes.

        Args:
            values: Replaced by the sums.

        Raises:
            TrainingError: If a process has ended.
        """
        if self.of > 1:
            with self.report_lost_process():
                distributed.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait for all processes; TrainingError if one of them has ended."""
        if self.of > 1:
            with self.report_lost_process():
                distributed.barrier()

    @contextmanager
    def report_lost_process(self) -> Iterator[None]:
        """Turn failures of the block into a TrainingError: another process has ended."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]
            raise TrainingError(
                f"process {self.number} of {self.of} that train together lost the others, one of which ended: see "
                f"what that one said ({reason})"
            ) from None


SINGLE = ProcessGroup()


@contextmanager
def torchrun_group(device: str) -> Iterator[ProcessGroup]:
    """Join the processes that ``torchrun`` started.

    Args:
        device: cpu, or cuda, where each process takes a GPU.
    """
    number, of = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if of == 1:
        yield SINGLE
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with join_group(ProcessGroup(number, of), device) as group:
        yield group


@contextmanager
def join_group(group: ProcessGroup, device: str, meeting: str = "env://") -> Iterator[ProcessGroup]:
    """Join a group of processes while the block runs.

    Args:
        group: This process and their number.
        device: cpu or cuda.
        meeting: Address at which they meet, as torch writes it.

    Raises:
        TrainingError: If they do not come.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    with group.report_lost_process():
        distributed.init_process_group(
            backend, init_method=meeting, rank=group.number, world_size=group.of, timeout=PATIENCE
        )
    try:
        yield group
    finally:
        distributed.destroy_process_group()
