"""Gradient matching of one MJP upload among the pictures that its linear facts leave open."""

import copy
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy.optimize
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Attack, picture, showing_pictures
from fedmjp.attacks.labels import labels_of, mean_gradient
from fedmjp.attacks.matching_gradients import Candidates, PerCandidateGradients, unmatchable
from fedmjp.attacks.mjp.affine import of_one_upload
from fedmjp.attacks.mjp.facts import LinearFacts, linear_facts
from fedmjp.attacks.mjp.prior import MJP, ClosedFacts
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches, to_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

Floats = npt.NDArray[np.float64]
REMEMBERED = 30  # steps that L-BFGS makes its picture of the curvature from


class MjpMatchingOptions(Config):
    """Start and budget."""

    start: Literal["mjp_prior", "mjp_span"] = Field(
        "mjp_prior", description="the attack whose reconstruction is the start"
    )
    iterations: int = Field(150, ge=1, description="steps of L-BFGS, a little more evaluations")
    seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="per upload, the start apart; looked at after every step"
    )


class MjpMatching(ClosedFacts[VitClassifier]):
    """A search among the pictures that agree with the linear facts for one whose gradients agree as well.

    Patch t is fixed[t] + c_t^T B with unknown c_t (``fedmjp.attacks.mjp.facts``, 3 and 4), and masked patches satisfy
    c_t^T (B l) = 1 (5). The search is over what this leaves of the c_t, so that the facts hold at every
    step. The network is run with the mask and the unknown embedding, as the client did. Minimised is the sum
    over all parameters of the squared distance of their gradients, over the square of the uploaded one: each
    tensor counts alike, whatever its size. L-BFGS in float64, because the valley that leads to the picture is
    narrow and long.

    The gradient is a function of the *set* of masked patches (fact 2). Which of them is where is decided by
    the start, which has it from the prior.

    Without a mask the facts are the whole picture, and nothing is searched. With ``seconds``, a result
    depends on the machine's speed.
    """

    name = "mjp_matching"
    paper = "gradient matching (Geiping et al., NeurIPS 2020) within the linear facts of MJP; used in fedmjp"
    summary = "gradient matching with mask and unknown embedding, from mjp_prior, within the linear facts"
    requires = "the gradient of one picture, all parameters; what its start requires"
    exploits = "linear facts of MJP, smoothness of pictures, and the gradients of all layers"
    options_type = MjpMatchingOptions
    optimises = True

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name every parameter's gradient of a defended model, and what the facts need of another."""
        return _matched(model) if model.defended else super().tensors(model)

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse several steps, tensors that cannot be matched, and whatever the start refuses."""
        if threat.update == "delta" and threat.local_steps > 1:
            return f"matches one gradient, not the sum of {threat.local_steps} steps"
        alien = unmatchable(model, _matched(model)) if model.defended else []
        if alien:
            return f"tensors of this kind cannot be matched: {', '.join(alien)}"
        first = self._first().refusal(model, threat)
        return f"its start, {self.options.start}: {first}" if first else None

    def handles(self, model: VitClassifier, threat: ThreatModel) -> frozenset[Mark]:
        """Name what MJP does. The distance takes noise and rounding for gradients of the picture."""
        del threat
        return MJP if model.defended else frozenset()

    def _first(self) -> Attack:
        return showing_pictures(ATTACKS.get(self.options.start)())

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        facts = linear_facts(upload, model, threat)
        result = picture(facts.stated, model), dict[str, float]()
        if facts.mask.any():
            start_generator = torch_generator(generator.initial_seed(), "start")
            first = self._first().run([upload], model, threat, generator=start_generator)[0].images
            result = self._search(_Mismatch(upload, facts, model, threat), first)
        return Reconstruction(result[0], {"masked_patches": float(facts.mask.sum()), **result[1]})

    def _search(self, mismatch: "_Mismatch", first: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the best picture that the budget allows, and diagnostics of the search."""
        start = mismatch.coefficients(first).cpu().numpy().ravel()
        began, steps, best = time.monotonic(), 0, (float("inf"), start)

        def evaluate(values: Floats) -> tuple[float, Floats]:
            nonlocal best
            loss, slope = mismatch(values)
            best = min(best, (loss, values.copy()), key=lambda point: point[0])
            return loss, slope

        def after_step(_: Floats) -> None:
            nonlocal steps
            steps += 1
            self.on_progress(steps, self.options.iterations, best[0])
            if self.options.seconds is not None and time.monotonic() - began >= self.options.seconds:
                raise StopIteration

        at_start = evaluate(start)[0]
        self.on_progress(0, self.options.iterations, at_start)
        scipy.optimize.minimize(
            evaluate,
            start,
            jac=True,
            method="L-BFGS-B",
            callback=after_step,
            options={"maxiter": self.options.iterations, "maxcor": REMEMBERED, "ftol": 0, "gtol": 0},
        )
        if not np.isfinite(best[0]):
            raise AttackFailedError(f"{self.name}: the gradients at the start are not finite")
        diagnostics = {"loss_at_start": at_start, "loss": best[0], "iterations": float(steps)}
        return picture(mismatch.patches(best[1]), mismatch.model), diagnostics


def _matched(model: VitClassifier) -> list[str]:
    return [name for name, _ in model.named_parameters()]


class _Mismatch:
    """The distance of a picture's gradients from an upload's: called with coefficients, it gives value and slope.

    The pictures are those that agree with the facts, by coefficients (patches, unknowns) along the basis.
    """

    def __init__(self, upload: Upload, facts: LinearFacts, model: VitClassifier, threat: ThreatModel) -> None:
        self.model, self._affine = model, of_one_upload(facts)
        self._mask = facts.mask[None, None]
        self._labels = torch.tensor([labels_of(upload, model, threat)], device=facts.mask.device)
        targets = {name: mean_gradient(upload, name, model, threat) for name in _matched(model)}
        self._targets = {name: target[None] for name, target in targets.items() if target.any()}
        self._squares = torch.stack([target.square().sum() for target in self._targets.values()])
        self._comparison = PerCandidateGradients(
            copy.deepcopy(model).double(), list(self._targets), label_smoothing=threat.label_smoothing
        )

    def coefficients(self, image: Tensor) -> Tensor:
        """Return the coefficients (patches, unknowns) of a picture.

        Args:
            image: (1, 3, size, size) in [0, 1].
        """
        normalised = (image.to(self.model.mean) - self.model.mean) / self.model.std
        along: Tensor = to_patches(normalised, self.model.patch_size)[0].double() @ self._affine.basis.mT
        return along

    def patches(self, coefficients: Tensor | Floats) -> Tensor:
        """Return the patches (patches, values) in the network's input space.

        Args:
            coefficients: (patches, unknowns), or flat.
        """
        basis = self._affine.basis
        along = torch.as_tensor(coefficients).to(basis).reshape(-1, len(basis))
        patches: Tensor = self._affine.fixed + along @ basis
        return patches

    def __call__(self, values: Floats) -> tuple[float, Floats]:
        coefficients = torch.tensor(values, device=self._squares.device, requires_grad=True)
        with torch.enable_grad():
            loss = self._distance(self.patches(coefficients))
            (slope,) = torch.autograd.grad(loss, coefficients)
        return float(loss.detach()), slope.cpu().numpy()

    def _distance(self, patches: Tensor) -> Tensor:
        normalised = from_patches(patches[None], self.model.image_size, self.model.patch_size)
        images = normalised * self.model.std + self.model.mean
        agreement = self._comparison.agreement(Candidates(images[None], self._labels, self._mask), self._targets)
        ratio = 1 / agreement.scale
        distances = ratio.square() * agreement.squares - 2 * ratio * agreement.products + self._squares
        return (distances / self._squares).sum()
