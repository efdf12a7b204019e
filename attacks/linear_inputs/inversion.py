"""Pictures from the inputs of a network's first linear layer, with the gradients in front of that layer as equations.

The layer's gradient shows its inputs f and the gradients at its outputs, so that the gradient at f itself is known:
delta = W^T d. The part in front of the layer, h with parameters theta, then states two things of the picture x:
h(x) = f, and the gradient of <delta, h(x)> by theta, which was uploaded. Both are searched for with Adam on the
picture's Fourier coefficients, in units of natural pictures' spectrum, under total variation. Max-pooling and ReLU make
the search end at different pictures from different seeds, whose mean is nearer to the true one than each.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from fedmjp.attacks.base import Attack
from fedmjp.attacks.labels import mean_gradient
from fedmjp.attacks.linear_inputs.attack import first_layer, layer_refusal, layered, read_inputs
from fedmjp.config import Config
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.entrance import Entrance
from fedmjp.models.layers import LayeredNetwork, inputs_of, training_copy
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

START = 0.05  # standard deviation of the first coefficients
# Luminance and two colour differences of red, green and blue, about as natural pictures vary along them.
COLOURS = ((0.57, 0.5, 0.2), (0.57, 0.0, -0.4), (0.57, -0.5, 0.2))


class FeatureInversionOptions(Config):
    """How long and from how many seeds is searched."""

    iterations: int = Field(1000, gt=0, description="of each search")
    restarts: int = Field(5, gt=0, description="searches from different seeds, whose pictures are averaged")
    seconds: float | None = Field(None, gt=0, description="of processors, that all searches may take together")
    step_size: float = Field(0.1, gt=0, description="of Adam, which falls along half a cosine")
    variation: float = Field(0.05, ge=0, description="weight of total variation")
    spectrum: float = Field(1.5, ge=0, description="power of the frequency by which amplitudes of pictures fall")
    samples: int = Field(100_000, gt=0, description="as of linear_inputs")


@dataclass(frozen=True)
class _Equations:
    """What is known of the pictures behind one upload."""

    network: LayeredNetwork
    module: torch.nn.Module
    features: Tensor  # (batch, inputs) of the layer
    slopes: Tensor  # (batch, inputs): gradients of the loss at these
    gradients: dict[str, Tensor]  # of parameters in front of the layer, by name

    def misfits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the squared relative error of the features, and one minus the cosine of the gradients.

        Args:
            images: (batch, channels, height, width).
        """
        layer = self.network.layer
        assert layer is not None  # noqa: S101 (else refused)
        entered = (images - self.network.mean.to(images)) / self.network.std.to(images)
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            features = inputs_of(self.module, layer.module, entered)
        of_features = (features - self.features).square().sum() / self.features.square().sum()
        if not self.gradients:
            return of_features, torch.zeros_like(of_features)
        parameters = [self.module.get_parameter(name) for name in self.gradients]
        computed = torch.autograd.grad((features * self.slopes).sum(), parameters, create_graph=True)
        pairs = list(zip(computed, self.gradients.values(), strict=True))
        product = torch.stack([(candidate * uploaded).sum() for candidate, uploaded in pairs]).sum()
        lengths = [
            torch.stack([tensor.square().sum() for tensor in side]).sum().sqrt() for side in zip(*pairs, strict=True)
        ]
        return of_features, 1 - product / (lengths[0] * lengths[1]).clamp_min(1e-30)


class FeatureInversion(Attack[Entrance]):
    """Search for the pictures whose features and gradients an upload of a convolutional network shows.

    First ``linear_inputs`` reads features; only certified ones are searched for. It was measured on small networks
    with two convolutions (README of attacks); the deeper a network and the larger its pictures, the less of a picture
    comes back within minutes. ``feature_misfit`` and ``gradient_misfit`` are those of the mean picture: a low one is
    no proof, since pooling forgets.
    """

    name = "feature_inversion"
    paper = (
        "Geiping et al., NeurIPS 2020 (cosine, total variation); Zhu and Blaschko, R-GAP, ICLR 2021 (layer by layer)"
    )
    summary = "pictures from the first linear layer's exact inputs and the convolutions' gradients: CNNs and alike"
    requires = "a network of pictures with a linear layer, of whose inputs linear_inputs certifies those of the batch"
    exploits = (
        "the gradient at the linear layer's inputs is known: convolutions state two equations of the picture each"
    )
    options_type = FeatureInversionOptions
    optimises = True
    stack = 1

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Name weight and bias of the linear layer, and every parameter that is sent of what lies in front of it."""
        network, layer = layered(model), first_layer(model)
        if network is None or layer is None:
            return []
        return list(dict.fromkeys([layer.weight, layer.bias, *_in_front(network)]))

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Require pictures, a linear layer that is no head of many records, and a single step."""
        network = layered(model)
        if network is None:
            return "needs the network itself, of which the weights or the entrance alone are known"
        if not network.is_of_pictures:
            return f"needs pictures of one or three channels; records of shape {network.shape} enter the network"
        if network.problem:
            return network.problem
        if network.layer is None:
            return "needs a linear layer with a bias that reads one row per record and is sent"
        if threat.update == "delta" and threat.local_steps > 1:
            return f"needs one step: features move during {threat.local_steps}"
        return layer_refusal(network.layer, threat)

    @override
    def reconstruct(
        self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        network = layered(model)
        assert network is not None  # noqa: S101 (else refused)
        started = time.process_time()
        equations = self._equations(upload, network, threat, generator)
        shape = (upload.num_examples, *network.shape)
        spectrum = _Spectrum(shape, self.options.spectrum, network.mean.device)
        total = torch.zeros(shape, device=network.mean.device)
        runs = 0
        for number in range(self.options.restarts):
            budget = None
            if self.options.seconds is not None:
                seconds_left = self.options.seconds - (time.process_time() - started)
                budget = seconds_left / (self.options.restarts - number)
                if seconds_left <= 0 and runs:
                    break
            total += self._search(equations, spectrum, generator, number, budget)
            runs += 1
        mean = total / runs
        with torch.enable_grad():
            of_features, of_gradients = (float(value.detach()) for value in equations.misfits(mean))
        images = mean.clamp(0, 1).expand(-1, 3, -1, -1).contiguous()
        diagnostics = {"feature_misfit": of_features**0.5, "gradient_misfit": of_gradients, "restarts": float(runs)}
        return Reconstruction(images, diagnostics)

    def _equations(
        self, upload: Upload, network: LayeredNetwork, threat: ThreatModel, generator: torch.Generator
    ) -> _Equations:
        layer = network.layer
        assert layer is not None  # noqa: S101 (else refused)
        samples = self.options.samples
        inputs = read_inputs(upload, network, threat, layer, samples=samples, generator=generator)
        if not bool(inputs.certified.all()):
            count = int(inputs.certified.sum())
            raise AttackNotApplicableError(
                f"{self.name}: the inputs of {layer.module} are certified for {count} of {upload.num_examples} records"
            )
        weight = network.get_parameter(layer.weight).detach().double().flatten(1)
        gradients = {name: mean_gradient(upload, name, network, threat) for name in _in_front(network)}
        return _Equations(
            network,
            training_copy(network.module),
            inputs.rows.float(),
            (inputs.slopes @ weight).float(),
            {name: gradient.float() for name, gradient in gradients.items() if bool(gradient.any())},
        )

    def _search(
        self,
        equations: _Equations,
        spectrum: "_Spectrum",
        generator: torch.Generator,
        number: int,
        seconds: float | None,
    ) -> Tensor:
        """Return the pictures at the end of one search, (batch, channels, height, width)."""
        options, started = self.options, time.process_time()
        coefficients = (START * torch.randn(spectrum.shape, generator=generator)).to(spectrum.amplitudes.device)
        coefficients.requires_grad_()
        optimiser = torch.optim.Adam([coefficients], lr=options.step_size)
        used, iteration = 0.0, 0
        with torch.enable_grad():
            while used < 1:
                optimiser.param_groups[0]["lr"] = options.step_size * (1 + math.cos(math.pi * used)) / 2
                images = spectrum.pictures(coefficients)
                outside = (images - images.clamp(0, 1)).square().mean()
                loss = sum(equations.misfits(images)) + options.variation * _variation(images) + outside
                (coefficients.grad,) = torch.autograd.grad(loss, [coefficients])
                optimiser.step()
                iteration += 1
                used = iteration / options.iterations
                if seconds is not None:
                    used = max(used, (time.process_time() - started) / max(seconds, 1e-9))
                finished = (number + min(used, 1)) * options.iterations
                self.on_progress(int(finished), options.restarts * options.iterations, float(loss.detach()))
        return spectrum.pictures(coefficients.detach())


class _Spectrum:
    """Fourier coefficients of pictures in units of natural pictures' amplitudes, which fall with the frequency."""

    def __init__(self, shape: Sequence[int], power: float, device: torch.device) -> None:
        batch, channels, height, width = shape
        rows, columns = torch.fft.fftfreq(height, device=device), torch.fft.rfftfreq(width, device=device)
        frequencies = (rows[:, None].square() + columns.square()).sqrt().clamp_min(1 / max(height, width))
        amplitudes = frequencies**-power
        self.amplitudes = amplitudes / amplitudes.mean()
        self.size = (height, width)
        self.shape = (batch, channels, height, len(columns), 2)
        self.colours = torch.tensor(COLOURS, device=device) if channels == 3 else torch.ones(1, 1, device=device)

    def pictures(self, coefficients: Tensor) -> Tensor:
        """Return the pictures of coefficients, grey where these are zero.

        Args:
            coefficients: (batch, channels, height, width // 2 + 1, 2), real and imaginary parts.
        """
        scaled = torch.view_as_complex(coefficients) * self.amplitudes
        planes = torch.fft.irfft2(scaled, s=self.size, norm="ortho")
        return 0.5 + torch.einsum("rc,bchw->brhw", self.colours, planes)


def _variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours along columns and rows, summed over pictures."""
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean((1, 2, 3))
    across = (images[..., :, 1:] - images[..., :, :-1]).abs().mean((1, 2, 3))
    return (down + across).sum()


def _in_front(network: LayeredNetwork) -> list[str]:
    """Name the parameters that are sent and that the linear layer's inputs depend on."""
    assert network.layer is not None  # noqa: S101 (else refused)
    module = training_copy(network.module)
    records = torch.zeros((2, *network.shape), device=network.mean.device)
    with torch.enable_grad():
        features = inputs_of(module, network.layer.module, records)
        parameters = [(name, value) for name, value in module.named_parameters() if name in network.sent]
        if not features.requires_grad:
            return []
        slopes = torch.autograd.grad(features.sum(), [value for _, value in parameters], allow_unused=True)
    return [name for (name, _), slope in zip(parameters, slopes, strict=True) if slope is not None]
