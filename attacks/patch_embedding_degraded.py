"""The equation of ``patch_embedding`` where defences degraded both of its sides."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, picture
from fedmjp.attacks.entries import COARSE, coarse, read_entries, unread
from fedmjp.attacks.joint_posterior import Equations, PicturePrior, agreement, most_likely
from fedmjp.attacks.natural_patches import prior_refusal
from fedmjp.attacks.patch_embedding import PatchEmbeddingAttack, PatchEmbeddingWiener
from fedmjp.attacks.token_gradients import count_refusal, positions_refusal, shown_tokens
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.models import names
from fedmjp.models.entrance import Entrance, count_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import FLOAT32, ThreatModel

# Agreement of what two uploads alone say, from which on they are of one picture. On a small trained model under six
# degradations it was 0.5 or more of one picture, and 0.18 or less of two.
ALIKE = 0.25


class DegradedOptions(Config):
    """How long it works."""

    rounds: int = Field(26, ge=1, le=200, description="of the alternation between both sides, at most")


class PatchEmbeddingDegraded(Attack[Entrance]):
    """Solve G_E = D^T X where each entry of G_E and of D is known as far as the defences leave it known.

    Noise and rounding are noise on both sides; what was pruned lies below the smallest entry that was kept; a
    quantised entry lies within a step of what was sent; signs bound by zero (``fedmjp.attacks.entries``). D and X are
    estimated together, X under a prior of whole natural pictures (``fedmjp.attacks.joint_posterior``). A clipping
    factor is on
    both sides.

    Further uploads of the same picture add their equations: of the same weights as further observations of the same D,
    of others with a D of their own. Which they are is told by whether the first look at each alone agrees: pictures
    that are nearly alike are taken for one, and uploads that show too little are left out. Random crops of a picture
    are nearly alike and not one: where clients take them, each upload is read alone.

    It knows nothing of the network behind the tokens: D is not held against what the model computes of such a picture.
    Of signs, hard pruning and few bits it makes blurred pictures; that is its limit. It takes no masks, batches and
    sums. An upload that nothing degraded is given to ``patch_embedding``.
    """

    name = "patch_embedding_degraded"
    paper = "errors in both sides, bounds by expectation propagation (Minka, UAI 2001); used in fedmjp"
    summary = "patch_embedding for pruned, quantised, rounded and noisy entries and for signs, of several uploads"
    requires = "gradients or deltas of patch and position embedding, of one picture; a size that the prior knows"
    exploits = "what is left of each entry, in both gradients, and that of further uploads of the picture"
    options_type = DegradedOptions
    reads_others = True
    any_steps = True  # the equation is linear in the gradients, which steps add up
    uses_natural_patches = True

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Name both sides of the equation."""
        del model
        return [names.POSITION_EMBEDDING, names.PATCH_WEIGHT]

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Refuse masks, batches and sizes that the prior does not know."""
        if model.defended:
            return "takes no masks into account: of MJP uploads take an attack that does, such as mjp_intersection"
        if threat.batch_size > 1:
            return f"needs uploads of one picture: of {threat.batch_size} only a mixture is seen"
        return positions_refusal(model) or prior_refusal(model)

    def handles(self, model: Entrance, threat: ThreatModel) -> frozenset[Mark]:
        """Name all that is done to entries, unless one defence hides what another leaves."""
        del model
        scaled: frozenset[Mark] = frozenset({"scaled"})
        entries: frozenset[Mark] = frozenset({"rounded", "noisy"})
        return scaled | entries | COARSE if unread(threat) is None else scaled

    @override
    def reconstruct(
        self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        if is_clean(upload, threat):
            few = count_refusal(count_patches(model), len(model.get_parameter(names.PATCH_WEIGHT))) is None
            exact = PatchEmbeddingAttack() if few else PatchEmbeddingWiener()
            return exact.run([replace(upload, others=())], model, threat, generator=generator)[0]
        pictures = PicturePrior(model)
        linked = [upload, *further(upload, pictures, model, threat)]
        by_weights: dict[str, list[Upload]] = {}
        for sent in linked:
            by_weights.setdefault(sent.weights, []).append(sent)
        systems = [_equations(sent, model, threat) for sent in by_weights.values()]
        patches, diagnostics = most_likely(systems, pictures, self.options.rounds)
        counts = {"uploads_kept": 1.0 + len(upload.others), "uploads_linked": float(len(linked))}
        return Reconstruction(picture(patches, model), {**diagnostics, **counts})


def is_clean(upload: Upload, threat: ThreatModel) -> bool:
    """Say whether entries are as the client computed them, in float32.

    Args:
        upload: A client's upload.
        threat: States the defences.
    """
    whole = all(torch.finfo(tensor.dtype).eps / 2 <= FLOAT32 for tensor in upload.tensors.values())
    return whole and threat.marks <= {"scaled"}


def further(upload: Upload, pictures: PicturePrior, model: Entrance, threat: ThreatModel) -> list[Upload]:
    """Select the client's further uploads of the same picture: a first look at each alone agrees with that at this one.

    Args:
        upload: With its ``others``.
        pictures: The prior.
        model: The model that the server had sent.
        threat: States defences and crops.
    """

    def look(at: Upload) -> Tensor:
        return most_likely([_equations([at], model, threat)], pictures, 1)[0]

    if threat.crop_scale or not upload.others:
        return []
    first = look(upload)
    return [candidate for candidate in upload.others if agreement(first, look(candidate), pictures) > ALIKE]


def different(uploads: Sequence[Upload]) -> list[Upload]:
    """Leave out uploads that repeat an earlier one.

    Args:
        uploads: Those of the same weights.
    """
    distinct: list[Upload] = []
    for upload in uploads:
        if not any(torch.equal(_patch(upload), _patch(former)) for former in distinct):
            distinct.append(upload)
    return distinct


def _equations(uploads: Sequence[Upload], model: Entrance, threat: ThreatModel) -> Equations:
    """Set up the equations of uploads of the same weights; equal uploads are one observation."""
    rows, right = [], []
    for upload in different(uploads):
        positions = upload.tensors[names.POSITION_EMBEDDING][0].to(model.mean.device)
        if not (unread(threat) is None and coarse(threat) and _patch(upload).any()):
            shown_tokens(positions, model.prefix_tokens)  # refuses what shows no token at all
        rows.append(read_entries(positions, threat).part(model.prefix_tokens).transposed)
        right.append(read_entries(_patch(upload).to(model.mean.device), threat))
    return Equations(rows, right)


def _patch(upload: Upload) -> Tensor:
    """Return the patch embedding's gradient, (dim, values)."""
    return upload.tensors[names.PATCH_WEIGHT].flatten(1)
