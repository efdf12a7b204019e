"""Whether a solution's patches are right, told from residuals alone. No residual tells their order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.base import on_device
from fedmjp.attacks.mjp.facts import LinearFacts
from fedmjp.attacks.mjp.span.equations import PatchEquations, PatchSet, attended
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

# Residuals in units of what rounding makes of a true token's. At the truth of 9 pictures the median was 1.0 to
# 1.3, and the largest below 1.3 unless a token drowned in rounding.
MEDIAN, LARGEST = 1.5, 2.0
ERROR = 10 ** (-30 / 20)  # root mean square of a patch's error, of 1, that a certificate promises: 30 dB
# What the estimate of the error is taken times, because it is one of a typical error. Of 317 solutions with such
# residuals on DeiT-Ti the worst patch's error was at most 12.7 times its estimate.
MARGIN = 15.0
FLOAT32 = 2.0**-24
# Where some patches are missing or wrong, all residuals are larger, through attention. Of four bundled pictures with
# medians of 4 to 12, three were 8 to 9 dB better than those of the prior, and one 0.3 dB worse.
MOST, NEARLY = 0.5, 15.0


@dataclass(frozen=True)
class SpanCertificate:
    """Of one solution: residuals are those of patches with the attention among them, in units of rounding's."""

    found: int  # masked patches found, each counted once
    masked: int  # masked patches
    median: float  # of the residuals
    largest: float
    expected: float  # error per pixel that the largest residual stands for

    @property
    def consistent(self) -> bool:
        """Tell whether rounding explains most residuals: the solution is right but for some patches."""
        return self.median <= MEDIAN

    @property
    def likely(self) -> bool:
        """Tell whether most patches are nearly right: most masked ones are found, and few residuals are far off."""
        return self.consistent or (self.found > MOST * self.masked and self.median <= NEARLY)

    @property
    def holds(self) -> bool:
        """Tell whether every patch is certified: visible ones in place, masked ones as a set."""
        small = self.consistent and self.largest <= LARGEST and MARGIN * self.expected <= ERROR
        return self.found == self.masked and small

    def diagnostics(self) -> dict[str, float]:
        """Return the figures for the trial's row."""
        return {
            "content_certified": float(self.holds),
            "found_patches": float(self.found),
            "masked_patches": float(self.masked),
            "residual_median": self.median,
            "residual_max": self.largest,
            "expected_error": self.expected,
        }


def expected_error(upload: Upload, facts: LinearFacts, model: VitClassifier, threat: ThreatModel) -> float:
    """Estimate the error per pixel of an upload without a mask, whose linear facts are the whole picture.

    The least-squares solution X of D^T X = G has the covariance s^2 (D D^T)^-1, s^2 being the variance of
    what no solution explains, and no less than rounding and noise that the server is told of on the entries of G.

    Args:
        upload: Of one picture.
        facts: Its linear facts.
        model: With the weights of the upload.
        threat: What the attacker is granted.
    """
    gradient = on_device(upload, names.PATCH_WEIGHT, model).flatten(1)
    rows = on_device(upload, names.POSITION_EMBEDDING, model)[0, model.prefix_tokens :][~facts.mask]
    orthogonal, triangular = torch.linalg.qr(rows.mT)
    open_part = gradient - (gradient @ facts.basis.mT) @ facts.basis
    unexplained = open_part - orthogonal @ (orthogonal.mT @ open_part)
    free = max((rows.shape[1] - len(facts.mask)) * gradient.shape[1], 1)
    variance = unexplained.square().sum() / free
    floor = threat.rounding**2 * gradient.square().mean() + threat.noise_on(gradient) ** 2
    noise = torch.maximum(variance, floor).sqrt()
    inverse = torch.linalg.pinv(triangular)
    return float((noise * inverse.mT.norm(dim=0)).max() * model.std.max())


def certify(equations: PatchEquations, solution: PatchSet, count: int, pixel: float) -> SpanCertificate:
    """Certify a solution with all visible patches from its residuals.

    Args:
        equations: Of the upload.
        solution: Its patches.
        count: The first so many masked patches stand in for no others.
        pixel: What 1 in the network's input space is in [0, 1].
    """
    relative, expected = _errors(equations, solution)
    errors_of_masked = expected[len(solution.places) :] * equations.values**0.5
    return SpanCertificate(
        found=_distinct(solution.masked[:count], errors_of_masked[:count]),
        masked=equations.unknowns,
        median=float(relative.median()),
        largest=float(relative.max()),
        expected=float(expected.max()) * pixel,
    )


def _distinct(masked: Tensor, error: Tensor) -> int:
    """Count the masked patches that are not nearer to an earlier one than the errors (masked,) of both.

    One patch found twice in place of another that resembles it leaves residuals that rounding may explain.
    """
    near = torch.cdist(masked, masked, compute_mode="donot_use_mm_for_euclid_dist") <= error[:, None] + error
    return int((~near.tril(-1).any(dim=1)).sum())


def _errors(equations: PatchEquations, solution: PatchSet) -> tuple[Tensor, Tensor]:
    """Return (patches,) relative residuals, and errors per value.

    If r is noise of the same size in all n equations, its variance is |r|^2 / n and the coefficients'
    covariance that times (J^T J)^-1.
    """
    places, coefficients = solution.all_places(equations), solution.coefficients
    point = equations.at(attended(equations, solution)(equations.tokens(coefficients, places)))
    noise = equations.noise(point)
    matrices, _ = equations.normal(point, coefficients, places)
    variance = torch.maximum(point.cost, noise.square()) / equations.count
    # The matrices are formed in float32: what it does not resolve may be negative, and counts as hardly determined.
    strengths = torch.linalg.eigvalsh(matrices)
    spread = strengths.clamp(min=FLOAT32 * strengths[:, -1:]).reciprocal().sum(dim=1)
    return point.cost.sqrt() / noise, (variance * spread / equations.values).sqrt()
