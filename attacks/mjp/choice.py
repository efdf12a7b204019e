"""Close what uploads leave open by the prior whose picture explains an upload best.

The attacker has the model and the mask, so it can compute what a client would have sent of a picture. The
gradients of position and unknown embedding are compared, which the facts are read from anyway: they went through the
whole network. Only their direction counts, since a client may have scaled its update. Three pictures are tried:

- the most natural one (``fedmjp.attacks.mjp.closing``);
- the flattest one (``flatten`` there), for drawings, print and shadings;
- where neither explains anything, that of ``patch_embedding``, which knows nothing of MJP. It contradicts the facts.

Without a label told, each picture is given the one that fits best. With J the derivatives of the logits by the two
embeddings, and p the probabilities, the gradient is g = J^T (p - e_y). J g = J J^T (p - e_y) is least at the label y,
as long as those of different classes are nearly orthogonal; a step of the embeddings along g shows it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedmjp.attacks.base import on_device, picture
from fedmjp.attacks.labels import mean_gradient
from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.mjp.closing import close, flatten
from fedmjp.attacks.mjp.facts import BLURRED
from fedmjp.attacks.token_gradients import Reading, solve_patches, token_gradients
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.entrance import Entrance
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

# Another picture is taken if its distance is below this share of that so far. For 20 natural pictures, one upload each,
# the flattest had at least 0.95 of the natural one's; of print at most 0.8.
CLEARLY = 0.85
LOST = 0.8  # a distance that hardly explains anything; of 28 natural pictures one had 0.84, all others 0.62 at most
STEP = 1e-2  # of the position embedding's standard deviation, the longest that an entry of the embeddings is moved


def close_best(
    affine: AffinePatches, mask: Tensor, upload: Upload, model: Entrance, threat: ThreatModel
) -> tuple[Tensor, dict[str, float]]:
    """."""
    natural = close(affine, model)
    several_steps = threat.update == "delta" and threat.local_steps > 1
    if not len(affine.basis) or threat.marks & BLURRED or several_steps or not isinstance(model, VitClassifier):
        return natural, {}
    flat = flatten(affine, natural, model)
    candidates = {
        name: (gradient_distance(picture(patches, model), mask, upload, model, threat), patches)
        for name, patches in {"natural": natural, "flat": flat}.items()
    }
    best = "flat" if candidates["flat"][0] < CLEARLY * candidates["natural"][0] else "natural"
    if candidates[best][0] > LOST:
        naive = _solve_naively(upload, model, threat)
        candidates["naive"] = gradient_distance(picture(naive, model), mask, upload, model, threat), naive
        best = "naive" if candidates["naive"][0] < CLEARLY * candidates[best][0] else best
    distance, patches = candidates[best]
    kinds = {f"closed_{name}": float(name == best) for name in ("flat", "naive")}
    return patches, {"gradient_distance": distance, **kinds}


def gradient_distance(image: Tensor, mask: Tensor, upload: Upload, model: VitClassifier, threat: ThreatModel) -> float:
    """Return the sine of the angle between the gradient of a picture and the upload's, 1 if obtuse.

    Args:
        image: (1, 3, size, size) in [0, 1].
        mask: (patches,) bool, of ``upload``.
        upload: Computed with ``model``'s weights from one picture.
        model: The model that the server had sent.
        threat: States the label smoothing.
    """
    read = [names.POSITION_EMBEDDING, *([names.UNKNOWN_EMBEDDING] if model.defended else [])]
    entrance = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in read}
    sent = {name: mean_gradient(upload, name, model, threat).to(entrance[name]) for name in read}
    arguments = (image.to(model.mean), mask[None] if model.defended else None)
    with torch.enable_grad():
        logits = functional_call(model, entrance, arguments)
        if upload.labels:
            label = torch.tensor(upload.labels, device=logits.device)
        else:
            label = (_moved_logits(model, entrance, sent, arguments) - logits).argmin(dim=1)
        loss = F.cross_entropy(logits, label, label_smoothing=threat.label_smoothing)
        gradients = torch.autograd.grad(loss, list(entrance.values()))
    computed, uploaded = (
        torch.cat([part.flatten() for part in parts]).double() for parts in (gradients, [*sent.values()])
    )
    cosine = float(F.cosine_similarity(computed, uploaded, dim=0).clamp(0, 1))
    return math.sqrt(1 - cosine**2)


@torch.no_grad()
def _moved_logits(
    model: VitClassifier, entrance: dict[str, Tensor], sent: dict[str, Tensor], arguments: tuple[Tensor, Tensor | None]
) -> Tensor:
    """Return the logits after a step of the embeddings along what was sent."""
    longest = max(float(gradient.abs().max()) for gradient in sent.values())
    step = STEP * float(entrance[names.POSITION_EMBEDDING].std()) / max(longest, torch.finfo(torch.float32).tiny)
    moved = {name: entrance[name] + step * sent[name] for name in sent}
    logits: Tensor = functional_call(model, moved, arguments)
    return logits


def _solve_naively(upload: Upload, model: Entrance, threat: ThreatModel) -> Tensor:
    """Return what ``patch_embedding`` makes of the upload."""
    tokens = token_gradients(upload, model, threat, Reading.ONE_TOKEN)
    return solve_patches([tokens], [on_device(upload, names.PATCH_WEIGHT, model).flatten(1)])[0]
