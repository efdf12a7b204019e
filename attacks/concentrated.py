"""Label and thumbnail of a picture, for weights that concentrate a gradient (server ``concentrator``).

- Label: the head is zero, and the feature f a constant. The head's gradient is then u f^T, with u = 1 / K - q for K
  classes and q = 1 at the label, and no other tensor has one.
- Thumbnail: attention gives the class token the mean colours o of the picture's quadrants, and its projection is zero.
  The gradient of the projections is then g o^T, with a g that the server chose, large beside all others. The label
  sets its sign alone: the head gives one class a probability of a half, whose own pictures have the other sign.

A clipped update is therefore all signal. With an unknown scale s, an estimate r of s f (or s o) whose noise is normal
with variance v, and the prior N(m, S) of f, the log-likelihood of a label is |r|^2 / 2v + log N(r; s m, s^2 S + v), up
to a constant. What nobody tells the server it takes from the upload: v from entries where the gradient is zero, s from
a column where o is constant, or else from all that are possible.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, Made
from fedmjp.attacks.linear_systems import GaussianPrior
from fedmjp.attacks.natural_patches import patch_statistics
from fedmjp.defences.privacy import Calibrated
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Features, Reconstruction, Upload
from fedmjp.threat import FLOAT32, ThreatModel

SERVER = "concentrator"
Content = Literal["label", "thumbnail"]
QUADRANTS = 4  # top left, top right, bottom left, bottom right
COLOURS = 3 * QUADRANTS
LOUDER, LOWER = 0, 1  # dimensions of a token whose difference the head reads: g is one there, and minus one
LOUD = 100.0  # length of f or o: beside it the gradients of biases, which are as large as u or g, are next to nothing
CONSTANT = 0.3  # of a thumbnail's typical length: the part that tells the scale and its sign
TABLE_SIZE, TABLE_WINDOW = 32, 16  # a quadrant of pictures of 32 pixels is the largest window that statistics have
# Of the length of s f: from far too much noise to none. At steps of a fifth the evidence hardly moves.
SCALES = torch.logspace(-5, 2, 81, dtype=torch.float64)
NEAR = torch.linspace(-3, 3, 13, dtype=torch.float64)  # deviations around the scale that the constant column tells


def constant_columns(width: int) -> int:
    """Count the columns of a feature that tells the label; the others are zero, and show the noise.

    Args:
        width: Of the feature.
    """
    return width // 2


def quadrant_slots(model: VitClassifier) -> list[tuple[int, int]]:
    """List where each quadrant's mean colours enter a projection: block, and first of three columns.

    Args:
        model: With a head of attention for each quadrant.
    """
    slots = [
        (place, head * (model.backbone.embed_dim // block.attn.num_heads))
        for place, block in enumerate(model.backbone.blocks)
        for head in range(block.attn.num_heads)
    ]
    return slots[:QUADRANTS]


def projection(block: int) -> str:
    """Name the projection of a block's attention.

    Args:
        block: Its number.
    """
    return f"backbone.blocks.{block}.attn.proj.weight"


@lru_cache(maxsize=1)
def thumbnail_prior() -> GaussianPrior:
    """Return the prior of mean colours in [0, 1], (12,), quadrant by quadrant, red first.

    A quadrant of a picture of 32 pixels is a window whose mean colours the table of natural patches gives. Neighbouring
    quadrants are taken to be as alike as those of a window: pictures have no preferred scale.
    """
    mean, covariance = patch_statistics(TABLE_SIZE, TABLE_WINDOW)
    half = TABLE_WINDOW // 2
    averages = torch.zeros(QUADRANTS, 3, 3, TABLE_WINDOW, TABLE_WINDOW, dtype=torch.float64)
    for quadrant in range(QUADRANTS):
        top, start = half * (quadrant // 2), half * (quadrant % 2)
        for channel in range(3):
            averages[quadrant, channel, channel, top : top + half, start : start + half] = 1 / half**2
    rows = averages.reshape(COLOURS, -1)
    inner = rows @ covariance @ rows.T
    whole = rows.reshape(QUADRANTS, 3, -1).mean(dim=0)
    shrink = ((whole @ covariance @ whole.T).diag() / inner.diag()[:3]).sqrt().repeat(QUADRANTS)
    return GaussianPrior(mean[:: TABLE_WINDOW**2].repeat(QUADRANTS), shrink[:, None] * inner * shrink)


def thumbnail_gain() -> float:
    """Return the factor from a difference of colours in [0, 1] to the feature, so that a typical one is ``LOUD``."""
    return LOUD / math.sqrt(float(thumbnail_prior().covariance.diag().sum()))


@dataclass(frozen=True)
class FeatureEvidence:
    """What one upload says.

    Attributes:
        hypotheses: (hypotheses,) float64, the probability of each.
        feature: (columns,) float64, the expected feature.
        noise: Length of the noise on an estimate, over the length of the largest.
    """

    hypotheses: Tensor
    feature: Tensor
    noise: float


def weigh(
    estimates: Tensor,
    variance: float,
    prior: GaussianPrior,
    *,
    constant: int,
    flipped: float = 0.0,
    longest: float = math.inf,
) -> FeatureEvidence:
    """Compute the posterior of hypothesis and feature over all scales.

    Args:
        estimates: (hypotheses, columns) float64, of s f under each.
        variance: Of the noise on each entry.
        prior: Of the feature, (columns,).
        constant: The column that is the same for all pictures.
        flipped: Prior probability that s is negative.
        longest: Length that clipping leaves of s f.
    """
    typical = float(estimates.square().sum(dim=1).max().sqrt())
    length = float(prior.mean.square().sum() + prior.covariance.diag().sum()) ** 0.5
    anchor = float(prior.mean[constant])
    column = (estimates[:, constant] / anchor)[:, None] + math.sqrt(variance) / abs(anchor) * NEAR
    grid = (SCALES * typical / length).expand(len(estimates), -1)
    scales = torch.cat([grid, -grid, column], dim=1)
    odds = torch.where(scales < 0, flipped, 1 - flipped).log()
    odds = odds.masked_fill(scales.abs() * abs(anchor) > longest, -math.inf)  # no f is shorter than its constant
    variances, directions = prior.spectrum
    rotated, centre = (estimates @ directions)[:, None], prior.mean @ directions
    total = scales[:, :, None] ** 2 * variances + variance
    misfit = rotated - scales[:, :, None] * centre
    log = odds - 0.5 * (misfit**2 / total + total.log()).sum(dim=2)
    log = log + 0.5 * estimates.square().sum(dim=1, keepdim=True) / variance
    weights = torch.softmax(log.flatten(), dim=0).reshape(log.shape)
    posterior = centre + scales[:, :, None] * variances / total * misfit
    feature = (weights[:, :, None] * posterior).sum(dim=(0, 1)) @ directions.T
    noise = math.sqrt(variance * estimates.shape[1]) / max(typical, 1e-300)
    return FeatureEvidence(weights.sum(dim=1), feature, noise)


def _clipped_to(threat: ThreatModel) -> float:
    """Return the norm that the server is told an update was clipped to before noise came on it; infinity for none."""
    norms = [part.options.clipping_norm for part in threat.pipeline.defences if isinstance(part, Calibrated)]
    return min(norms, default=math.inf)


def _noise(silent: Tensor, signal: Tensor, threat: ThreatModel) -> float:
    """Estimate the variance of the noise on an entry from entries without signal."""
    rounding = max(threat.rounding, FLOAT32)
    variance = float(silent.square().mean()) + rounding**2 * float(signal.square().mean())
    return max(variance, torch.finfo(torch.float64).tiny)


class _Concentrated(Attack[VitClassifier, Made]):
    """A reader of what the server ``concentrator`` has clients say with their whole gradient."""

    paper = "matched filter for the Gaussian mechanism, as its trade-off curve allows (Dong, Roth and Su, 2022)"
    exploits = "clipping and noise bound a whole update, which these weights spend on one chosen thing"
    reads_others = True
    content: Content

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse all weights but those that say the same."""
        del model
        server = threat.server
        if server is None or server.name != SERVER or server.build().options.tells != self.content:
            sent = "honest weights" if server is None else f"those of {server.text}"
            return f"reads what weights of server {SERVER}:tells={self.content} concentrate, not {sent}"
        if self.content == "label" and threat.labels_known:
            return "the server is told the labels: there is nothing to find out"
        return None

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Made:
        del generator  # nothing is drawn
        uploads = [upload, *(sibling for sibling in upload.others if sibling.weights == upload.weights)]
        means = {
            name: torch.stack([sent.tensors[name].double().cpu() for sent in uploads]).mean(dim=0)
            for name in self.tensors(model)
        }
        return self._read(means, model, threat)

    @abstractmethod
    def _read(self, gradients: Mapping[str, Tensor], model: VitClassifier, threat: ThreatModel) -> Made:
        """Read mean gradients, float64."""


class ConcentratedLabel(_Concentrated[Features]):
    """The label, by a matched filter: the likeliest of K equally long gradients at equal angles.

    Under Gaussian noise no other way is right more often.

    Example:
        >>> import fedmjp
        >>> scenario = fedmjp.Scenario(
        ...     model={"name": "deit_micro", "image_size": 32, "patch_size": 8},
        ...     defences=["local_dp:epsilon=1000"], server="concentrator",
        ... )
        >>> exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=32))
        >>> sent = exchange.model(scenario)
        >>> fedmjp.attack("concentrated_label", exchange.upload, scenario, model=sent).labels == exchange.private.labels
        tensor([True])
    """

    name = "concentrated_label"
    summary = "the label of a picture from weights whose whole gradient is one row per class"
    requires = f"a server {SERVER}:tells=label; the gradient of the head's weight, of one picture"
    reveals = "labels"
    content = "label"
    handled = frozenset({"shuffled", "masked", "noisy", "rounded", "pruned", "scaled", "signs"})

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name the gradient of the head's weight."""
        del model
        return [names.HEAD_WEIGHT]

    @override
    def _read(self, gradients: Mapping[str, Tensor], model: VitClassifier, threat: ThreatModel) -> Features:
        gradient = gradients[names.HEAD_WEIGHT]
        classes, width = gradient.shape
        columns = constant_columns(width)
        rows = gradient[:, :columns].sum(dim=1, keepdim=True) / math.sqrt(columns)
        length = (classes - 1) / classes  # |u|^2
        estimates = (rows.mean() - rows) / length
        variance = _noise(gradient[:, columns:], rows, threat) / length
        prior = GaussianPrior(torch.full((1,), LOUD).double(), torch.zeros(1, 1).double())
        evidence = weigh(estimates, variance, prior, constant=0)
        best = evidence.hypotheses.argmax()[None]
        return Features(best, diagnostics={"probability": float(evidence.hypotheses.max()), "noise": evidence.noise})


class ConcentratedThumbnail(_Concentrated[Reconstruction]):
    """Mean colours of the four quadrants, as a Gaussian prior of natural pictures and the noise leave them.

    What comes back is that thumbnail, enlarged. Shuffled patches are in the wrong quadrants, of which it knows nothing;
    masked ones are in none.
    """

    name = "concentrated_thumbnail"
    summary = "a thumbnail of four mean colours from weights whose gradient says next to nothing else"
    requires = f"a server {SERVER}:tells=thumbnail; gradients of the attention's projections, of one picture"
    content = "thumbnail"
    handled = frozenset({"noisy", "rounded", "scaled"})

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name the gradients of the projections that quadrants enter."""
        return sorted({projection(block) for block, _ in quadrant_slots(model)})

    @override
    def _read(self, gradients: Mapping[str, Tensor], model: VitClassifier, threat: ThreatModel) -> Reconstruction:
        slots = quadrant_slots(model)
        colours, gain = thumbnail_prior(), thumbnail_gain()
        signal = {name: (tensor[LOUDER] - tensor[LOWER]) / math.sqrt(2) for name, tensor in gradients.items()}
        silent = torch.cat([tensor[LOWER + 1 :].flatten() for tensor in gradients.values()])
        read = [signal[projection(block)][start : start + 3] for block, start in slots]
        block, start = slots[0]
        estimates = torch.cat([*read, signal[projection(block)][start + 3 : start + 4]])[None]
        mean = torch.cat([torch.zeros(COLOURS), torch.tensor([CONSTANT * LOUD])]).double()
        prior = GaussianPrior(mean, F.pad(gain**2 * colours.covariance, (0, 1, 0, 1)))
        variance = _noise(silent, estimates, threat)
        classes = model.backbone.num_classes
        limit = _clipped_to(threat)
        evidence = weigh(estimates, variance, prior, constant=COLOURS, flipped=1 / classes, longest=limit)
        values = (colours.mean + evidence.feature[:COLOURS] / gain).reshape(1, 2, 2, 3)
        image = F.interpolate(values.permute(0, 3, 1, 2).float(), size=model.pixels, mode="bilinear").clamp(0, 1)
        return Reconstruction(image, {"noise": evidence.noise})
