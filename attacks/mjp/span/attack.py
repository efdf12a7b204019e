"""One MJP upload of a deployed vision transformer, solved exactly where it lets itself be."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import picture
from fedmjp.attacks.first_block import block
from fedmjp.attacks.mjp import facts as linear
from fedmjp.attacks.mjp.affine import AffinePatches, of_one_upload
from fedmjp.attacks.mjp.closing import close
from fedmjp.attacks.mjp.prior import ClosedFacts
from fedmjp.attacks.mjp.span.certificate import SpanCertificate, certify, expected_error
from fedmjp.attacks.mjp.span.equations import TENSORS, PatchEquations, equations
from fedmjp.attacks.mjp.span.joint import solve_jointly
from fedmjp.attacks.mjp.span.naturalness import Naturalness
from fedmjp.attacks.mjp.span.search import SpanSearch
from fedmjp.attacks.mjp.span.tokens import stated_tokens, suffice
from fedmjp.attacks.mjp.span.visible import IMPOSSIBLE
from fedmjp.attacks.natural_patches import prior_refusal
from fedmjp.attacks.reassembly import reassemble
from fedmjp.config import Config
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

TOGETHER = 6  # steps of the joint iteration
SAME = 0.01  # root mean square, of 1, of a patch: what is nearly alike becomes one where it moves farther
MOST, TRIES = 0.5, 4  # of the patches: where more are masked, their order is tried so often
SOLVED = 0.85  # of the time, at most, before the order is tried
SEARCHED = 0.6  # of the time, at most, for tokens that prove themselves


class SpanOptions(Config):
    """Options of ``mjp_span``."""

    seconds: float = Field(
        240.0, gt=0, allow_inf_nan=False, description="of work of one core, after which no iteration goes on"
    )


class MjpSpan(ClosedFacts[VitClassifier]):
    """Every token is an isolated zero of equations that the first block's gradients state.

    The MLP's weight gradients span its inputs and its activations, and a token whose activations lie in that span is a
    true one. Taken out of the sums one after the other, most tokens are met from random points, masked ones as well,
    and each proves itself (``fedmjp.attacks.first_block``). The linear facts (``fedmjp.attacks.mjp.facts``) leave each
    patch in an
    affine space of M dimensions, M being the number of masked patches, and tell the place of every token (``tokens``).
    Then all patches are solved together (``joint``). Where most tokens are not met, the visible patches are solved from
    the most natural picture on (``fedmjp.attacks.mjp.closing``), and masked ones are zeros of the same equations
    (``equations``) that many starts lead to (``search``); each proves itself without the others (``free``).

    What is missing then resembles what is known. Known tokens are kept apart from each other, and missing ones are
    sought beside them (``separation``). Those that are not found are copies, as many as the visible patches attend to
    (``counts``), fitted to what these state of them (``unseen``).

    A certificate tells from the residuals whether the patches are right (``certificate``). It certifies the masked ones
    as a set (``content_certified``), never their order: the upload says nothing of it, and they are put into their
    places by how they fit (``fedmjp.attacks.reassembly``). A solution that most tokens or most residuals speak for is
    answered
    even without a certificate; patches that no picture has are then those of ``mjp_prior``, which is the answer
    altogether where neither do.

    Without a mask the linear facts are the whole picture, and there is nothing to certify.

    All iterations end when the thread has worked for ``seconds``, or for most of them under a large mask, whose order
    is then tried until they are over; the certificate and the first try of the order may come after that.
    Whether a picture is solved depends on the machine.
    """

    name = "mjp_span"
    paper = "ours: follows from the definition of MJP and the chain rule"
    summary = "one MJP upload solved exactly through the spans of the first GELU; certifies patches, not their order"
    requires = (
        "the gradient, or the weight delta of one step, of one picture, with the first block's MLP and attention; "
        "a pre-norm vision transformer with GELU; an image size that the prior knows"
    )
    exploits = "the first MLP's gradients span its activations, and GELU tells true tokens from their mixtures"
    options_type = SpanOptions
    optimises = True

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Return what the linear facts need, and of a defended model the first block's MLP and attention output."""
        return [*super().tensors(model), *(TENSORS if model.defended else ())]

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Require one step on one picture, the block written out in ``block``, and the prior."""
        if threat.batch_size != 1 or (threat.local_steps != 1 and threat.update == "delta"):
            return "needs one step on a single picture: more of either spans more tokens than the dimensions hold"
        if model.index_embedding is not None:
            return "the model has an index embedding, whose gradient shows all tokens: patch_embedding is enough"
        return linear.refusal(model, threat) or _rank_refusal(model) or block.refusal(model) or prior_refusal(model)

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        began = time.thread_time()
        # Tokens prove themselves in units of the upload's rounding, and the search ends far above that of float64.
        upload = replace(upload, tensors={name: tensor.float() for name, tensor in upload.tensors.items()})
        facts = linear.linear_facts(upload, model, threat)
        patches = close(of_one_upload(facts), model)
        if not facts.mask.any():
            diagnostics = {"masked_patches": 0.0, "expected_error": expected_error(upload, facts, model, threat)}
        else:
            setup, affine = equations(upload, facts, model), AffinePatches(facts.outside, facts.basis)
            last = began + self.options.seconds
            large = bool(facts.mask.double().mean() > MOST)
            setup = replace(setup, until=began + self.options.seconds * (SOLVED if large else 1))
            tokens = stated_tokens(upload, setup, model, began + SEARCHED * self.options.seconds, generator)
            solved, certificate = solve(setup, affine, patches, tokens, model, generator)
            if certificate.found and (certificate.likely or suffice(setup, tokens)):
                patches = _in_order(solved, facts.mask, model, generator, TRIES if large else 1, last)
            diagnostics = {**certificate.diagnostics(), "tokens_met": float(len(tokens))}
        return Reconstruction(picture(patches, model), {**diagnostics, "seconds": time.thread_time() - began})


def _rank_refusal(model: VitClassifier) -> str | None:
    """Say why the MLP's gradients do not span the activations of all tokens; None if they do."""
    tokens, dimensions = 1 + model.grid**2, model.get_parameter(names.POSITION_EMBEDDING).shape[-1]
    if model.defended and tokens >= dimensions:
        return f"{tokens} tokens are not fewer than their {dimensions} dimensions: the gradients do not span them all"
    return None


def solve(
    setup: PatchEquations,
    affine: AffinePatches,
    natural: Tensor,
    tokens: Tensor,
    model: VitClassifier,
    generator: torch.Generator,
) -> tuple[Tensor, SpanCertificate]:
    """Solve for patches (patches, values), masked ones in arbitrary order, and certify them.

    Args:
        setup: The equations.
        affine: What the linear facts leave open.
        natural: (patches, values) the most natural picture, whose patches replace missing ones.
        tokens: (tokens, dim) whitened ones that prove themselves.
        model: With the weights of the upload.
        generator: Of the starts, on the CPU.
    """
    naturalness = Naturalness.of(affine, model)
    start = (natural - affine.fixed) @ affine.basis.mT
    solution, count = SpanSearch(setup, naturalness, start[setup.visible], tokens, generator).go()
    pixel = float(model.std.max())
    certificate = certify(setup, solution, count, pixel)
    if count == setup.unknowns and not certificate.holds:  # one by one, some may still be a little off
        joint_solution, _ = solve_jointly(setup, solution, steps=TOGETHER)
        moved = (joint_solution.coefficients - solution.coefficients).norm(dim=1) * pixel / setup.values**0.5
        of_all = certify(setup, joint_solution, count, pixel)
        if of_all.holds and moved.max() < SAME:
            solution, certificate = joint_solution, of_all
    places, coefficients = solution.all_places(setup), solution.coefficients
    possible = naturalness.excess(coefficients, places) <= IMPOSSIBLE
    patches = natural.clone()
    patches[places[possible]] = naturalness.patches(coefficients, places)[possible]
    return patches, certificate


def _in_order(
    patches: Tensor, hole: Tensor, model: VitClassifier, generator: torch.Generator, tries: int, until: float
) -> Tensor:
    """Put the patches in the hole into the places where they fit, with tries while there is time."""
    patch_images = to_patches(picture(patches, model), model.patch_size)[0]
    source = reassemble(patch_images, hole, model.grid, model.patch_size, generator=generator, tries=tries, until=until)
    return patches[source.to(patches.device)]
