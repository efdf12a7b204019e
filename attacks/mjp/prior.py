"""One MJP upload, no pass through the network: what it states exactly, closed by a prior of pictures."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.base import picture
from attacks.mjp.affine import of_one_upload
from attacks.mjp.closed_facts import ClosedFacts
from attacks.mjp.closing import close
from attacks.mjp.facts import LinearFacts, linear_facts
from attacks.natural_pictures import NaturalPictures
from fedmjp.models.entrance import Entrance
from fedmjp.patches import from_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel


class MjpPrior(ClosedFacts):
    """Of all pictures that agree with the linear facts of an upload, the most natural one.

    An upload of MJP states M linear combinations short of everything about each patch in its true
    place, M being the number of masked patches (``attacks.mjp.facts``). The shuffle is not in it:
    what comes out is the clean picture in its own order, not the shuffled one. Among the pictures
    that agree, the attack takes the one of least energy under a Gaussian prior of whole pictures
    (``attacks.mjp.closing``): what the facts leave open of a patch is filled so that it continues
    its neighbours.

    Without a mask the facts are the whole picture, and the attack is ``patch_embedding``.
    """

    name = "mjp_prior"
    paper = "follows from the definition of MJP; used in fedmjp"
    summary = "linear facts of one MJP upload, closed by a prior of natural pictures; no pass through the network"
    requires = f"one picture per upload; {ClosedFacts.requires}"
    exploits = "MJP leaves everything but a span of the masked patches exact, and hides no place: pictures are smooth"

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Needs uploads of one picture, besides."""
        if threat.batch_size != 1:
            return f"reads uploads of one picture: of {threat.batch_size}, the gradients at the tokens are a sum"
        return super().requirement(model, threat)

    def _reconstruct(
        self,
        uploads: Sequence[Upload],
        model: Entrance,
        threat: ThreatModel,
        *,
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        del generators
        return [_close_one(linear_facts(upload, model, threat), model) for upload in uploads]


def _close_one(facts: LinearFacts, model: Entrance) -> Reconstruction:
    patches = close(of_one_upload(facts), model)
    return Reconstruction(
        picture(patches, model),
        {
            "masked_patches": float(facts.mask.sum()),
            "contrast": facts.contrast,
            "energy_per_value": _energy(patches, model) / patches.numel(),
        },
    )


def _energy(patches: Tensor, model: Entrance) -> float:
    """Of the picture under the prior; of the order of one per value for a usual picture."""
    prior = NaturalPictures.for_model(model)
    image = from_patches(patches[None].float(), model.image_size, model.patch_size)[0] - prior.mean[:, None, None]
    return float((image * prior.slope(image)).sum())
