"""Equations that single out the true tokens among those that the linear facts allow.

The facts say x_t = known_t + B^T c_t, so that token t enters the first block as z_t = s_t + Z c_t with
Z = E B^T. The MLP's weight gradients are sums over tokens of (gradient) x (input)^T, so their row spaces
are the spans of all tokens' inputs h_t = norm2(z_t + o_t) and activations a_t = GELU(fc1 h_t). Hence

    r(c) = [ (I - P2) h ; (I - P3) GELU(fc1 h) ; k (l.c - 1) if masked ] = 0,    h = norm2(z(c) + o(z(c)))

with the projections P2, P3 on these spans, known from the upload. The linear facts alone leave the masked
patches open up to any invertible mixing; the GELU does not commute with mixing, which makes every true
token an isolated zero of its own.

The attention output o needs the other tokens. Its mean with known weights is in the upload, too:
proj's gradients are sum_t do_t ho_t^T for the weight and g = sum_t do_t for the bias, so that
G^T g / |g|^2 = sum_t share_t ho_t with share_t = <do_t, g> / |g|^2, which sum to 1. The gradients at the
tokens stand in for do_t.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedmjp.attacks.base import on_device
from fedmjp.attacks.first_block.block import (
    FC1_WEIGHT,
    FC2_WEIGHT,
    PROJ_BIAS,
    PROJ_WEIGHT,
    FirstBlock,
    first_block,
    gelu_slope,
)
from fedmjp.attacks.first_block.equations import MlpPoint, Span
from fedmjp.attacks.linear_systems import NEGLIGIBLE
from fedmjp.attacks.mjp.facts import LinearFacts
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload

TENSORS = (PROJ_WEIGHT, PROJ_BIAS, FC1_WEIGHT, FC2_WEIGHT)

# k: at the true tokens of a float32 upload |r| is 8 to 27 times |l.c - 1|.
LEVEL_WEIGHT = 10.0
CHUNK = 24  # rows whose Jacobians are held at a time
Attended = Callable[[Tensor], Tensor]  # z (tokens, dim) to z + o(z)


@dataclass(frozen=True)
class PatchPoint(MlpPoint):
    """The equations at some tokens: what their values and their derivatives need."""

    deviation: Tensor  # (rows, 1), which norm2 divides by

    def __getitem__(self, rows: Tensor) -> "PatchPoint":
        """Select some of the tokens."""
        return PatchPoint(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def replace(self, rows: Tensor, source: "PatchPoint", source_rows: Tensor) -> None:
        """Overwrite rows with tokens of another point.

        Args:
            rows: Of this point.
            source: The other point.
            source_rows: Its tokens, as indices or (tokens,) bool.
        """
        for name in self.__dataclass_fields__:
            getattr(self, name)[rows] = getattr(source, name)[source_rows]


@dataclass(frozen=True)
class PatchEquations:
    """Of one upload."""

    block: FirstBlock
    mask: Tensor  # (patches,) bool
    start: Tensor  # (patches, dim), s_t
    directions: Tensor  # (dim, unknowns), Z
    level: Tensor  # (unknowns,), l
    class_token: Tensor  # (1, dim), with its position
    inputs: Span  # of the h_t
    activations: Span  # of the a_t
    mean_attention: Tensor  # (dim,), sum_t share_t o_t
    shares: Tensor  # (1 + patches,), of the class token and the patches; 0 where masked, as it is not known there
    values: int  # per patch
    until: float = math.inf  # of time.thread_time(): iterations that are at work then end where they are

    def time_is_up(self) -> bool:
        """Tell whether iterations are to end. Only this thread's work counts, so other jobs change no result."""
        return time.thread_time() > self.until

    @property
    def unknowns(self) -> int:
        """Count the coefficients per patch, which is also the number of masked patches."""
        return len(self.level)

    @property
    def count(self) -> int:
        """Count the equations per token, but for the level's."""
        return self.inputs.outside + self.activations.outside

    @cached_property
    def visible(self) -> Tensor:
        """Return the places of the patches that are not masked."""
        return (~self.mask).nonzero().flatten()

    @cached_property
    def hole(self) -> Tensor:
        """Return the places of the masked patches."""
        return self.mask.nonzero().flatten()

    @cached_property
    def _centred(self) -> Tensor:
        return self.directions - self.directions.mean(dim=0)

    @cached_property
    def _gained(self) -> Tensor:
        return self.block.fc1.weight * self.block.norm2.gain

    @cached_property
    def _expanded(self) -> Tensor:
        return self._gained @ self._centred

    def tokens(self, coefficients: Tensor, places: Tensor) -> Tensor:
        """Return the tokens z (rows, dim).

        Args:
            coefficients: (rows, unknowns).
            places: (rows,).
        """
        return self.start[places] + coefficients @ self.directions.T

    def at(self, attended: Tensor) -> PatchPoint:
        """Evaluate the equations.

        Args:
            attended: (rows, dim), z + o.
        """
        whitened, deviation = self.block.norm2.whiten(attended)
        point = MlpPoint.of(whitened, self.block, self.inputs, self.activations)
        return PatchPoint(**vars(point), deviation=deviation)

    def noise(self, point: PatchPoint) -> Tensor:
        """Return (rows,) the length that rounding gives r at true tokens."""
        return (self.inputs.expected(point.inputs) + self.activations.expected(point.activations)).sqrt()

    def level_error(self, coefficients: Tensor, places: Tensor) -> Tensor:
        """Return (rows,) the last equation: k (l.c - 1), 0 where not masked.

        Args:
            coefficients: (rows, unknowns).
            places: (rows,).
        """
        error: Tensor = LEVEL_WEIGHT * (coefficients @ self.level - 1) * self.mask[places]
        return error

    def normal(self, point: PatchPoint, coefficients: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Compute Gauss-Newton matrices (rows, unknowns, unknowns) and gradients (rows, unknowns), with o fixed.

        The gradients are exact, as they decide where the iteration ends. The matrices decide only how fast
        it gets there, and are formed in float32 in half the time. For orthonormal columns R of a span,
        J^T (I - R R^T) J = J^T J - (R^T J)^T (R^T J): what is outside of the span is never formed.

        Args:
            point: The equations at some tokens.
            coefficients: (rows, unknowns) of these.
            places: (rows,).
        """
        rows, unknowns = len(point.whitened), self.unknowns
        matrices = self.level.new_empty(rows, unknowns, unknowns)
        for start in range(0, rows, CHUNK):
            some = torch.arange(start, min(start + CHUNK, rows))
            inputs, activations = self.jacobians(point[some])
            gram = _gram_outside(inputs, self.inputs) + _gram_outside(activations, self.activations)
            matrices[some] = gram.double()
        level = self.mask[places].to(self.level)[:, None] * LEVEL_WEIGHT
        matrices += (level.square() * self.level)[:, :, None] * self.level
        return matrices, self.gradient(point) + level * self.level_error(coefficients, places)[:, None] * self.level

    def gradient(self, point: PatchPoint) -> Tensor:
        """Return (rows, unknowns), J^T r without J and without the level's."""
        at_gelu = point.outside_activations * gelu_slope(point.before_gelu)
        white = at_gelu @ self._gained + point.outside_inputs * self.block.norm2.gain
        along = (white * point.whitened).mean(dim=1, keepdim=True)
        gradient: Tensor = ((white - point.whitened * along) / point.deviation) @ self._centred
        return gradient

    def jacobians(self, point: PatchPoint) -> tuple[Tensor, Tensor]:
        """Return float32 Jacobians: (dim, rows, unknowns) of h and (hidden, rows, unknowns) of a."""
        white = point.whitened
        along = (white @ self._centred / white.shape[1]).float()  # layer normalisation removes it
        scale = (1 / point.deviation).T[:, :, None].float()
        gain = self.block.norm2.gain[:, None, None].float()
        inputs = gain * scale * (self._centred.float()[:, None] - white.T[:, :, None].float() * along)
        slopes = (gelu_slope(point.before_gelu) / point.deviation).T[:, :, None].float()
        bent = (self._gained @ white.T)[:, :, None].float()
        return inputs, slopes * (self._expanded.float()[:, None] - bent * along)

    @cached_property
    def freed(self) -> "PatchEquations":
        """Return the same equations for z + o itself, wherever attention may have taken it.

        h lies in a known span, so that z + o lies in the span of what norm2 makes h of, and the vector of
        constant: z + o = T y. The unknowns are y, of the one place 0.
        """
        norm = self.block.norm2
        constant = torch.ones_like(norm.gain)
        columns = torch.cat(
            [self.inputs.columns / norm.gain[:, None], torch.stack([norm.bias / norm.gain, constant], 1)], dim=1
        )
        left_vectors, singular, _ = torch.linalg.svd(columns, full_matrices=False)
        allowed = left_vectors[:, singular > NEGLIGIBLE * singular[0]]
        return replace(
            self,
            mask=self.mask[:1] & False,
            start=torch.zeros_like(self.start[:1]),
            directions=allowed,
            level=torch.zeros_like(allowed[0]),
        )


def _gram_outside(jacobian: Tensor, span: Span) -> Tensor:
    """Return (rows, unknowns, unknowns) of a Jacobian (values, rows, unknowns) projected outside of a span."""
    values, rows, unknowns = jacobian.shape
    inside = (
        (span.columns.T.float() @ jacobian.reshape(values, rows * unknowns)).view(-1, rows, unknowns).transpose(0, 1)
    )
    by_row = jacobian.transpose(0, 1)
    return by_row.mT @ by_row - inside.mT @ inside


@dataclass(frozen=True)
class PatchSet:
    """Tokens taken as known besides the class token, by the coefficients (rows, unknowns) of their patches."""

    places: Tensor  # (visible,) places of patches that are not masked
    visible: Tensor  # their coefficients
    masked: Tensor  # coefficients of masked patches, in no particular order

    @property
    def coefficients(self) -> Tensor:
        """Return those of the visible patches, then of the masked ones."""
        return torch.cat([self.visible, self.masked])

    def moved(self, coefficients: Tensor) -> "PatchSet":
        """Move the patches.

        Args:
            coefficients: (patches, unknowns), visible ones first.
        """
        return PatchSet(self.places, coefficients[: len(self.places)], coefficients[len(self.places) :])

    def all_places(self, setup: PatchEquations) -> Tensor:
        """Return the places of its coefficients; of masked patches any place in the hole."""
        return torch.cat([self.places, setup.hole[: len(self.masked)]])


def attended(setup: PatchEquations, patches: PatchSet, counts: Tensor | None = None) -> Attended:
    """Return the map z -> z + o(z), with o from the keys and values of known patches, and a common correction.

    As long as tokens are missing, o is off by nearly the same vector everywhere. The mean of o with the
    shares as weights is known exactly, so that the correction follows from the class token and the
    visible patches, whose shares are known. With every token known there is nothing to correct, nor if
    ``counts`` (masked,) say how often each known masked patch occurs.

    Args:
        setup: The equations.
        patches: The known ones.
        counts: (masked,), how often each known masked patch occurs; None if that is open.
    """
    block = setup.block
    visible_tokens = torch.cat([setup.class_token, setup.tokens(patches.visible, patches.places)])
    hidden = setup.tokens(patches.masked, setup.hole[: len(patches.masked)])
    looked_at = block.keys_values(torch.cat([visible_tokens, hidden]))
    if counts is not None:
        weights = torch.cat([torch.ones_like(visible_tokens[:, 0]), counts])
        return lambda tokens: tokens + block.attention(tokens, looked_at, weights)
    correction = torch.zeros_like(setup.mean_attention)
    if len(visible_tokens) + len(hidden) < 1 + len(setup.mask):
        shares = torch.cat([setup.shares[:1], setup.shares[1 + patches.places]])
        correction = setup.mean_attention - shares @ block.attention(visible_tokens, looked_at) / shares.sum()
    return lambda tokens: tokens + block.attention(tokens, looked_at) + correction


def equations(upload: Upload, facts: LinearFacts, model: VitClassifier) -> PatchEquations:
    """Set up the equations.

    Args:
        upload: Of one picture.
        facts: Its linear facts.
        model: With the weights of the upload.
    """
    block = first_block(model)
    positions, unknown, class_token, embedding, bias = (
        model.get_parameter(name).detach().double()
        for name in (
            names.POSITION_EMBEDDING,
            names.UNKNOWN_EMBEDDING,
            names.CLASS_TOKEN,
            names.PATCH_WEIGHT,
            names.PATCH_BIAS,
        )
    )
    embedding = embedding.flatten(1)
    placed = torch.where(facts.mask[:, None], unknown, positions[0, 1:]) + bias
    bias_gradient = on_device(upload, PROJ_BIAS, model)
    direction = bias_gradient / bias_gradient.square().sum()
    tokens = 1 + len(facts.mask)
    return PatchEquations(
        block=block,
        mask=facts.mask,
        start=facts.outside @ embedding.T + placed,
        directions=embedding @ facts.basis.T,
        level=facts.basis @ facts.level,
        class_token=class_token[0] + positions[0, :1],
        inputs=Span.of(on_device(upload, FC1_WEIGHT, model), tokens),
        activations=Span.of(on_device(upload, FC2_WEIGHT, model), tokens),
        mean_attention=block.proj(on_device(upload, PROJ_WEIGHT, model).T @ direction),
        shares=on_device(upload, names.POSITION_EMBEDDING, model)[0] @ direction,
        values=facts.basis.shape[1],
    )
