"""What the parts of ``fedmjp.benchmarks.performance.gpu`` share: the device, the size of the work, and times on it."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What is asked for.

    Attributes:
        device: cuda, or cpu to see whether it runs.
        pictures: Their source.
        n: Of the closed forms.
        deadline: By ``time.monotonic``.
    """

    device: str
    pictures: str
    n: int
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """Whether sizes are those of a GPU."""
        return self.device == "cuda"

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """What the work gives, and the seconds until the device has done it."""
        self.wait()
        began = time.perf_counter()
        made = work()
        self.wait()
        return made, time.perf_counter() - began

    def free(self) -> None:
        """Give memory back that nothing uses."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
