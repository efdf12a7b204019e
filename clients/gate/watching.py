"""See what an app trains on while it runs, by hooks of torch: nothing in the app changes.

Batches are tensors of any kind that enter a module: pictures, volumes, series, tables, tokens, in training or
evaluation mode. A row counts once its loss' gradient went into a step; what is only passed through a network does not.
Training in other processes, and without torch, is not seen: the policy's ``unseen`` answers.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fedmjp.clients.gate.batches import Pass, is_batch

KEPT = 64  # rows of which all is kept, to compare with
LOSSES = ("cross_entropy", "nll_loss")  # of torch.nn.functional, which their modules call as well
COUNTED = 64  # distinct rows after which nobody needs to know how many more
LEAST = 1e-3  # a row whose gradient is a smaller share of the largest in its step hides nothing
Optimiser = torch.optim.Optimizer


@dataclass
class Observation:
    """What was seen of one call of an app. It never leaves the process."""

    module: nn.Module | None = None  # the outermost that was trained
    images: list[Tensor] = field(default_factory=list)  # rows of the first batches, as they entered the module
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
        return min(len(self.digests), COUNTED)


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
        self._pass: Pass | None = None  # the one that is going on, or the last
        self._pending: list[Pass] = []  # passes whose gradients no step has used yet
        self._dropped: list[list[Pass]] = []  # passes whose gradients were cleared before a step
        self._backward = -1  # number of the backward pass that is going on, or the last
        self._keeping = True  # whether what is compared with is still gathered
        self._paused = False  # while the callback runs the model itself

    @contextmanager
    def watching(self) -> Iterator[Observation]:
        """Keep the hooks in place while the context is open."""
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._on_entry),
                register_module_forward_hook(self._on_exit, always_call=True),
                register_optimizer_step_pre_hook(self._on_step),
                register_optimizer_step_post_hook(self._on_stepped),
            ):
                stack.callback(handle.remove)
            for loss in LOSSES:
                plain = getattr(F, loss)
                setattr(F, loss, self._watched(plain))
                stack.callback(setattr, F, loss, plain)
            yield self.seen
        if not self.seen.steps:
            # Gradients may be what is sent: of those that were cleared, any may have been copied.
            groups = [group for group in (*self._dropped, self._pending) if group]
            self._count(min(groups, key=lambda group: len(_entered(group)), default=[]))

    def _watched(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(plain)
        def loss(*arguments: Any, **named: Any) -> Tensor:
            self._on_loss(*arguments, **named)
            return plain(*arguments, **named)

        return loss

    def _on_entry(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._depth += 1
        if self._paused or not torch.is_grad_enabled():
            return
        if self._depth == 1:
            self._pass = None
        first = next((value for value in arguments if isinstance(value, Tensor)), None)
        if first is None:
            return
        if self._pass is not None:
            self._pass.enter(module, first)
        elif is_batch(first):
            self._pass = Pass(first)
            self._pass.enter(module, first)

    def _on_exit(self, module: nn.Module, _arguments: object, output: object) -> None:
        self._depth -= 1
        if self._paused or self._pass is None or not torch.is_grad_enabled():
            return
        self._pass.leave(output)
        if self._depth:
            return
        outputs = self._pass.end(module, output, hashing=len(self.seen.digests) < COUNTED)
        if not outputs:
            self._pass = None
            return
        count = sum(map(len, self.seen.images)) + sum(finished.rows for finished in self._pending)
        self._keeping = self._keeping and count + self._pass.rows <= KEPT
        self._pass.keep(self._keeping)
        hooked: list[Any] = outputs
        for tensor in hooked:
            tensor.register_hook(functools.partial(self._on_gradient, self._pass))

    def _on_loss(self, *arguments: Any, **named: Any) -> None:
        target = arguments[1] if len(arguments) > 1 else named.get("target")
        if self._paused or self._pass is None or not torch.is_grad_enabled():
            return
        if not isinstance(target, Tensor) or target.is_floating_point():
            return
        self.seen.smoothing = float(named.get("label_smoothing", 0.0))
        if self._pass.labels is None and target.shape == (self._pass.rows,):
            self._pass.labels = target.detach().clone()

    def _on_gradient(self, finished: Pass, gradient: Tensor) -> None:
        if self._paused:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._drop_cleared()
        if finished not in self._pending:
            self._pending.append(finished)
            if not self.seen.steps:
                finished.mark_weights()
        finished.add_gradient(gradient)

    def _drop_cleared(self) -> None:
        """Drop passes whose gradients were cleared, unless the app took a step by itself."""
        if self._pending and all(finished.is_cleared() for finished in self._pending):
            if not self.seen.steps and any(finished.has_moved() for finished in self._pending):
                self._count(self._pending)
            else:
                self._dropped.append(self._pending)
            self._pending = []

    def _on_step(self, optimiser: Optimiser, _arguments: object, _named: object) -> None:
        observed = self.seen
        self._use(optimiser)
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

    def _on_stepped(self, optimiser: Optimiser, _arguments: object, _named: object) -> None:
        self._use(optimiser)  # of gradients that were computed in a closure

    def _use(self, optimiser: Optimiser) -> None:
        """Count the passes whose gradients a step uses."""
        groups = [group for group in optimiser.param_groups if group["lr"]]
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        used = [finished for finished in self._pending if finished.parameters() & stepped]
        self._count(used)
        self._pending = [finished for finished in self._pending if finished not in used]

    def _count(self, passes: list[Pass]) -> None:
        observed = self.seen
        observed.digests |= _entered(passes)
        largest = max((finished.largest for finished in passes), default=0.0)
        for finished in passes:
            rows = finished.rows_above(LEAST * largest)
            if not bool(rows.any()):
                continue
            observed.rows += int(rows.sum())
            if observed.module is None:  # whose truth may be its length
                observed.module = finished.module
            for target, values in (
                (observed.images, finished.images),
                (observed.labels, finished.labels),
                (observed.features, finished.features),
            ):
                if values is not None:
                    target.append(values[rows.to(values.device)])


def _entered(passes: list[Pass]) -> set[bytes]:
    """Collect the digests of rows that take part in the gradient of several passes."""
    least = LEAST * max((finished.largest for finished in passes), default=0.0)
    return {digest for finished in passes for digest in finished.digests_above(least)}
