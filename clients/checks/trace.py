"""One pass of a client's own pictures through the incoming model: what every layer gives, and the gradients there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmjp.clients.checks.base import Incoming
from fedmjp.errors import BadInputError

MOST_PICTURES = 16  # that are looked at: memory is that of a step on so many


@dataclass(frozen=True)
class Layer:
    """A Linear or a Conv2d as one pass used it: what went in, and the gradient of the summed loss at what came out.

    A gradient of its weight is G_i^T A_i for picture i, with a row of A_i (tokens, in) and G_i (tokens, out) for every
    token or place.
    """

    name: str
    module: nn.Linear | nn.Conv2d
    inputs: Tensor  # (pictures, tokens, in), of a Conv2d (pictures, channels, height, width)
    gradients: Tensor  # (pictures, tokens, out)

    def rows(self, picture: int) -> tuple[Tensor, Tensor]:
        """Return A_i and G_i of one picture.

        Args:
            picture: Its index.
        """
        visible, gradient = self.inputs[picture], self.gradients[picture]
        if isinstance(self.module, nn.Conv2d):
            conv = self.module
            places = F.unfold(visible[None], conv.kernel_size, conv.dilation, _padding(conv), conv.stride)
            visible = places[0].mT
        return visible, gradient

    @cached_property
    def measured(self) -> tuple[Tensor, float]:
        """Measure each picture's gradient.

        Returns:
            Norms by unit (pictures, out), and the norm of their mean over pictures.
        """
        units, total = [], torch.zeros(())
        for picture in range(len(self.gradients)):
            visible, gradient = self.rows(picture)
            single = gradient.float().mT @ visible.float()
            units.append(single.norm(dim=1))
            total = total + single
        return torch.stack(units), float(total.norm()) / len(units)

    @property
    def by_picture(self) -> Tensor:
        """(pictures,) float64 norms n_i of their gradients."""
        norms: Tensor = self.measured[0].double().norm(dim=1)
        return norms


@dataclass(frozen=True)
class Trace:
    """What a pass showed; layers are in the order in which they were used, the head is not among them."""

    logits: Tensor  # (pictures, classes)
    losses: Tensor  # (pictures,)
    slopes: Tensor  # (pictures,) norms of the losses' gradients at the logits
    body: tuple[Layer, ...]
    head: nn.Linear | None  # that gave the logits
    silent: tuple[str, ...]  # layers that give the same for all pictures, though these differ where they enter
    exact: int  # pictures with a class of probability exactly zero, or a wrong one of exactly one, in float64


@dataclass
class _Use:
    name: str
    module: nn.Linear | nn.Conv2d
    inputs: Tensor
    output: Tensor  # as the layer made it
    passed: Tensor  # the copy that the model went on with


def trace_model(incoming: Incoming) -> Trace:
    """Run a client's pictures through the incoming model, in evaluation mode, and differentiate the summed loss.

    Args:
        incoming: The model, pictures and labels.
    """
    like = next((tensor for tensor in incoming.model.parameters() if tensor.is_floating_point()), incoming.images)
    images = incoming.images[:MOST_PICTURES].detach().to(like.device)
    if images.is_floating_point():  # and no tokens
        images = images.to(like.dtype).clone().requires_grad_()
    labels = incoming.labels[:MOST_PICTURES].to(like.device)
    uses: list[_Use] = []
    # cuDNN differentiates recurrent layers in training mode alone.
    with (
        torch.enable_grad(), torch.backends.cudnn.flags(enabled=False), _evaluating(incoming.model),
        _watching(incoming.model, uses),
    ):  # fmt: skip
        logits = _logits(incoming.model(images), labels)
        losses = F.cross_entropy(logits, labels, reduction="none")
        reached = [use for use in uses if use.output.requires_grad]
        if not reached:
            raise BadInputError("no layer of the model takes part in its output")
        slopes = torch.autograd.grad(losses.sum(), [use.output for use in reached], allow_unused=True)
    head = next((use for use in reversed(uses) if use.passed is logits), None) or next(
        (use for use in reversed(uses) if isinstance(use.module, nn.Linear) and use.output.shape == logits.shape), None
    )
    probabilities = logits.detach().double().softmax(dim=1)
    targets = labels.double() if labels.ndim == 2 else F.one_hot(labels, probabilities.shape[1]).double()
    exact = ((probabilities == 0) | ((probabilities == 1) & (targets == 0))).any(dim=1)
    return Trace(
        logits=logits.detach(),
        losses=losses.detach(),
        slopes=(probabilities - targets).norm(dim=1),
        body=tuple(_layers([pair for pair in zip(reached, slopes, strict=True) if pair[0] is not head], len(images))),
        head=head.module if head is not None and isinstance(head.module, nn.Linear) else None,
        silent=tuple(sorted({use.name for use in uses if _is_silent(use)})),
        exact=int(exact.sum()),
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _watching(model: nn.Module, uses: list[_Use]) -> Iterator[None]:
    def keep(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not inputs:
            return output  # they were given by name
        # What follows may change its input in place; a copy leaves the layer's own output as it was.
        passed = output.clone()
        uses.append(_Use(name, module, inputs[0].detach(), output, passed))  # type: ignore[arg-type]
        return passed

    hooks = [
        module.register_forward_hook(lambda part, given, output, name=name: keep(name, part, given, output))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _logits(output: object, labels: Tensor) -> Tensor:
    """Find the first tensor (pictures, classes) in what a model returned, with a class for every label."""
    parts = list(output.values()) if isinstance(output, Mapping) else output
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        if isinstance(part, Tensor) and part.ndim == 2 and len(part) == len(labels):
            fits = part.shape == labels.shape if labels.ndim == 2 else int(labels.max()) < part.shape[1]
            if fits and part.shape[1] > 1:
                return part
    raise BadInputError("the model gives no logits of the labels' classes")


def _is_silent(use: _Use) -> bool:
    visible, output = use.inputs, use.output.detach()
    if len(visible) < 2 or len(output) != len(visible):
        return False
    return bool((output == output[:1]).all()) and not bool((visible == visible[:1]).all())


def _layers(pairs: list[tuple[_Use, Tensor | None]], pictures: int) -> Iterator[Layer]:
    """Collect each layer with all its uses, except those that mix pictures or that no gradient reaches."""
    by_name: dict[str, list[tuple[Tensor, Tensor]]] = {}
    modules: dict[str, nn.Linear | nn.Conv2d] = {}
    for use, slope in pairs:
        if slope is None:
            continue
        modules[use.name] = use.module
        if isinstance(use.module, nn.Conv2d):
            by_name.setdefault(use.name, [(use.inputs, slope.flatten(2).mT)])
            continue
        traced, gradient = _by_picture(use.inputs, pictures), _by_picture(slope, pictures)
        if traced is not None and gradient is not None:
            by_name.setdefault(use.name, []).append((traced, gradient))
    for name, parts in by_name.items():
        inputs, gradients = zip(*parts, strict=True)
        joined = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
        yield Layer(name, modules[name], joined, torch.cat(gradients, dim=1))


def _by_picture(tensor: Tensor, pictures: int) -> Tensor | None:
    """(pictures, tokens, features), also of windows of pictures, and where tokens come first; None of anything else."""
    if tensor.ndim >= 3 and len(tensor) != pictures and tensor.shape[1] == pictures:
        tensor = tensor.transpose(0, 1)
    if tensor.ndim < 2 or len(tensor) % pictures:
        return None
    return tensor.reshape(pictures, -1, tensor.shape[-1])


def _padding(conv: nn.Conv2d) -> tuple[int, ...]:
    """Compute the padding of a Conv2d in numbers, also where it is stated in a word."""
    if not isinstance(conv.padding, str):
        return conv.padding
    if conv.padding == "valid":
        return (0, 0)
    return tuple(step * (size - 1) // 2 for step, size in zip(conv.dilation, conv.kernel_size, strict=True))
