"""See what an app trains on while it runs, by public hooks of torch: nothing in the app changes.

Only what is trained in this process and thread's torch is seen. Where nothing is, the policy's ``unseen`` answers.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

KEPT = 64  # pictures of which all is kept, to compare with
LOSSES = ("cross_entropy", "nll_loss")  # of torch.nn.functional, which their modules call as well
COUNTED = 64  # distinct pictures after which nobody needs to know how many more


@dataclass
class Observation:
    """What was seen of one call of an app. It never leaves the process."""

    module: nn.Module | None = None  # the outermost that was trained
    images: list[Tensor] = field(default_factory=list)  # first batches, as they entered the module
    labels: list[Tensor] = field(default_factory=list)  # of all batches
    features: list[Tensor] = field(default_factory=list)  # what the last Linear read of the first batches
    rows: int = 0  # pictures with repeats
    digests: set[bytes] = field(default_factory=set)
    optimiser: str = ""
    learning_rates: set[float] = field(default_factory=set)
    momentum: float = 0.0
    weight_decay: float = 0.0
    steps: int = 0
    smoothing: float = 0.0

    @property
    def pictures(self) -> int:
        """Count distinct pictures, up to ``COUNTED``."""
        return len(self.digests)


class TrainingWatch:
    """Hooks for one call of an app.

    Args:
        on_first_step: Called once, right before the first step of an optimiser: module, images and labels are seen,
            and the weights are still those that came in. What it raises ends the training.
    """

    def __init__(self, on_first_step: Callable[[Observation], None] = lambda _seen: None) -> None:
        self.seen = Observation()
        self._on_first_step = on_first_step
        self._depth = 0
        self._pictured = False  # whether this pass has shown its pictures
        self._rows = 0  # of this pass
        self._labelled = True  # whether the labels of this pass are known
        self._keeping = True  # whether what is compared with is still gathered
        self._last: Tensor | None = None  # what the last Linear read in this pass
        self._outermost: nn.Module | None = None
        self._paused = False  # while the callback runs the model itself

    @contextmanager
    def watching(self) -> Iterator[Observation]:
        """Keep the hooks in place while the context is open."""
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after, always_call=True),
                register_optimizer_step_pre_hook(self._on_step),
            ):
                stack.callback(handle.remove)
            for loss in LOSSES:
                plain = getattr(F, loss)
                setattr(F, loss, self._watched(plain))
                stack.callback(setattr, F, loss, plain)
            yield self.seen

    def _watched(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(plain)
        def loss(*arguments: Any, **named: Any) -> Tensor:
            self._on_loss(*arguments, **named)
            return plain(*arguments, **named)

        return loss

    def _before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._paused or not torch.is_grad_enabled():
            return
        if self._depth > 1 and self._pictured and not (self._keeping and isinstance(module, nn.Linear)):
            return
        if self._depth == 1:
            self._pictured, self._outermost = False, module
        first = next((value for value in arguments if isinstance(value, Tensor)), None)
        if first is None or not first.is_floating_point():
            return
        if not self._pictured and module.training and first.ndim in (2, 4) and not first.requires_grad:
            self._pictured = True
            self._on_pictures(first)
            if self.seen.module is None:  # whose truth may be its length
                self.seen.module = self._outermost
        if isinstance(module, nn.Linear) and first.ndim == 2 and len(first) == self._rows:
            self._last = first.detach()

    def _after(self, _module: nn.Module, _arguments: object, _output: object) -> None:
        self._depth -= 1

    def _on_pictures(self, images: Tensor) -> None:
        observed = self.seen
        self._rows, self._labelled = len(images), False
        count = sum(map(len, observed.images))
        if len(observed.digests) < COUNTED:
            copies = images.detach().cpu().contiguous()
            for row in copies:
                observed.digests.add(hashlib.blake2b(row.flatten().view(torch.uint8).numpy(), digest_size=16).digest())
        self._keeping = self._keeping and count + len(images) <= KEPT
        if self._keeping:
            observed.images.append(images.detach().clone())
        observed.rows += len(images)

    def _on_loss(self, *arguments: Any, **named: Any) -> None:
        target = arguments[1] if len(arguments) > 1 else named.get("target")
        if self._paused or not torch.is_grad_enabled():
            return
        if not isinstance(target, Tensor) or target.is_floating_point():
            return
        self.seen.smoothing = float(named.get("label_smoothing", 0.0))
        if self._labelled or target.shape != (self._rows,):
            return
        self._labelled = True
        self.seen.labels.append(target.detach().clone())
        if self._keeping and self._last is not None and len(self._last) == self._rows:
            self.seen.features.append(self._last.clone())

    def _on_step(self, optimiser: torch.optim.Optimizer, _arguments: object, _named: object) -> None:
        observed = self.seen
        observed.steps += 1
        observed.optimiser = type(optimiser).__name__
        for group in optimiser.param_groups:
            observed.learning_rates.add(float(group["lr"]))
            observed.momentum = float(group.get("momentum") or 0.0)
            observed.weight_decay = float(group.get("weight_decay") or 0.0)
        if observed.steps == 1:
            self._paused = True
            try:
                self._on_first_step(observed)
            finally:
                self._paused = False
