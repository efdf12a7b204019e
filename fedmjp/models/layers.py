"""Any torch module as attacks on its linear layers take it: which layers read one row per record, and what follows."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedmjp.models.classifier import Classifier
from fedmjp.models.entrance import denormalised
from fedmjp.models.probing import tensors_of

PROBES = 4  # random records that a module is run on, to see what its layers read


@dataclass(frozen=True)
class LinearLayer:
    """A layer that computes one row of outputs from one row of inputs for each record, with its parameters' names.

    Attributes:
        module: Name of the submodule; a convolution whose kernel covers its whole input is such a layer, too.
        width: Inputs of a record.
        outputs: Outputs of a record.
        rectified: Whether no gradient passes outputs below zero, as in front of a ReLU.
        reads_record: Whether its inputs are the record itself, in their order.
    """

    module: str
    width: int
    outputs: int
    rectified: bool
    reads_record: bool

    @property
    def weight(self) -> str:
        """Return the name of the weight."""
        return f"{self.module}.weight" if self.module else "weight"

    @property
    def bias(self) -> str:
        """Return the name of the bias."""
        return f"{self.module}.bias" if self.module else "bias"


@dataclass(eq=False)
class LayeredNetwork:
    """A torch module of any kind with the shape of its records and the names of what clients send: an ``Entrance``.

    Attributes:
        module: With the weights that the server sent.
        shape: Of one record, as it enters the module.
        sent: Names of the parameters that uploads hold.
        mean: (channels, 1, 1) of pictures in [0, 1].
        std: (channels, 1, 1), the same.
        whole_numbers: Whether records are whole numbers, such as tokens.
    """

    module: nn.Module
    shape: tuple[int, ...]
    sent: frozenset[str]
    mean: Tensor = field(default_factory=lambda: torch.zeros(1, 1, 1))
    std: Tensor = field(default_factory=lambda: torch.ones(1, 1, 1))
    whole_numbers: bool = False
    patch_size = 0
    prefix_tokens = 0
    has_positions = False
    defended = False

    @classmethod
    def of(cls, classifier: Classifier) -> "LayeredNetwork":
        """Take one of our classifiers, all of whose parameters are sent.

        Args:
            classifier: Takes pictures in [0, 1].
        """
        sent = frozenset(name for name, _ in classifier.named_parameters())
        zero = torch.zeros_like(classifier.mean)
        return cls(classifier, (len(zero), *classifier.pixels), sent, zero, zero + 1)

    @property
    def is_of_pictures(self) -> bool:
        """Tell whether records are pictures of one or three channels."""
        return len(self.shape) == 3 and self.shape[0] in (1, 3) and not self.whole_numbers

    @property
    def pixels(self) -> tuple[int, int]:
        """Return height and width of its pictures; zeros where records are none."""
        return (self.shape[1], self.shape[2]) if self.is_of_pictures else (0, 0)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by the module's name.

        Args:
            target: The name.
        """
        return self.module.get_parameter(target)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter that uploads hold, by the module's name."""
        return ((name, value) for name, value in self.module.named_parameters() if name in self.sent)

    def denormalise(self, images: Tensor) -> Tensor:
        """Map images from the network's input space back to [0, 1]; values outside are clipped.

        Args:
            images: (batch, channels, height, width), normalised.
        """
        return denormalised(images, self.mean, self.std)

    @cached_property
    def problem(self) -> str | None:
        """Say why the module cannot be run on random records; None if it can."""
        return self._probed[1]

    @cached_property
    def layers(self) -> list[LinearLayer]:
        """List the layers that read one row per record, in the order in which the module applies them."""
        return self._probed[0]

    @cached_property
    def layer(self) -> LinearLayer | None:
        """Return the first of these layers of which uploads hold weight and bias: the nearest to the record."""
        return next((layer for layer in self.layers if {layer.weight, layer.bias} <= self.sent), None)

    @cached_property
    def _probed(self) -> tuple[list[LinearLayer], str | None]:
        module = training_copy(self.module).eval()
        generator = torch.Generator().manual_seed(0)
        if self.whole_numbers:
            records = torch.randint(0, 2, (PROBES, *self.shape), generator=generator)
        else:
            records = torch.randn((PROBES, *self.shape), generator=generator).requires_grad_()
        records = records.to(next(iter(module.parameters())).device)
        calls: list[_Call] = []
        names = {layer: name for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
        for layer in names:
            layer.register_forward_hook(lambda layer, inputs, output: _note(calls, _Call(layer, inputs[0], output)))
        try:
            with torch.enable_grad():
                logits = next(iter(tensors_of(module(records))))
                weights = torch.randn(logits.shape, generator=generator).to(logits)
                outputs = [call.output for call in calls if call.output.requires_grad]
                slopes = torch.autograd.grad((logits * weights).sum(), outputs, allow_unused=True) if outputs else ()
        except Exception as error:  # noqa: BLE001 (somebody else's module)
            first = (str(error).splitlines() or [type(error).__name__])[0]
            return [], f"the network does not take random records of shape {self.shape}: {first}"
        slope_of = {id(output): slope for output, slope in zip(outputs, slopes, strict=True)}
        uses = Counter(call.layer for call in calls)
        return [
            _described(names[call.layer], call, slope_of.get(id(call.output)), records)
            for call in calls
            if uses[call.layer] == 1 and call.reads_rows
        ], None


@dataclass(frozen=True)
class _Call:
    """What a layer read and gave, (records, ...)."""

    layer: nn.Linear | nn.Conv2d
    inputs: Tensor
    output: Tensor

    @property
    def reads_rows(self) -> bool:
        """Tell whether each output depends on all inputs of one record, by a weight of its own."""
        width, layer = self.layer.weight[0].numel(), self.layer
        plain = isinstance(layer, nn.Linear) or (layer.groups == 1 and self.output.shape[2:] == (1, 1))
        return plain and len(self.inputs) == PROBES and self.inputs.numel() == PROBES * width


def _note(calls: list[_Call], call: _Call) -> Tensor:
    """Keep a call, and hand a copy of its output on, which an activation may overwrite."""
    calls.append(call)
    return call.output.clone()


def _described(name: str, call: _Call, slope: Tensor | None, records: Tensor) -> LinearLayer:
    values = call.output.flatten(1)
    rectified = slope is not None and bool(slope.any()) and bool((values < 0).any())
    rectified = rectified and not bool(slope.flatten(1)[values < 0].any())  # type: ignore[union-attr]
    read = call.inputs.flatten(1)
    reads_record = read.shape == records.flatten(1).shape and bool(torch.equal(read, records.flatten(1)))
    return LinearLayer(name, read.shape[1], values.shape[1], rectified, reads_record)


def training_copy(module: nn.Module) -> nn.Module:
    """Copy a module in the mode of training, but without dropout and without BatchNorm's running statistics.

    Args:
        module: It is not changed.
    """
    copied = copy.deepcopy(module).train()
    for part in copied.modules():
        if isinstance(part, _DropoutNd):
            part.eval()
        elif isinstance(part, _BatchNorm):
            part.track_running_stats, part.running_mean, part.running_var = False, None, None
        part._forward_hooks.clear()
    return copied.requires_grad_(True)


def inputs_of(module: nn.Module, layer: str, records: Tensor, run: Callable[..., Any] | None = None) -> Tensor:
    """Compute what a layer reads of records, (records, inputs), differentiably.

    Args:
        module: That holds the layer.
        layer: The layer's name.
        records: (records, ...) as they enter the module.
        run: Runs the module on the records; None calls it.
    """
    read: list[Tensor] = []
    handle = module.get_submodule(layer).register_forward_pre_hook(lambda _, inputs: _stop(read, inputs[0]))
    try:
        (run or module)(records)
    except _StopError:
        pass
    finally:
        handle.remove()
    return read[0].reshape(len(records), math.prod(read[0].shape[1:]))


class _StopError(Exception):
    """The end of a forward pass whose remainder nobody reads."""


def _stop(read: list[Tensor], inputs: Tensor) -> None:
    read.append(inputs)
    raise _StopError
