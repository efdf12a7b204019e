"""MJP uploads, no pass through the network: what they state exactly, closed by a prior of pictures."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, Model, picture
from fedmjp.attacks.mjp.affine import of_one_upload
from fedmjp.attacks.mjp.choice import close_best
from fedmjp.attacks.mjp.facts import linear_facts, refusal, required_tensors
from fedmjp.attacks.natural_patches import size_refusal
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.defences.base import Mark
from fedmjp.models import names
from fedmjp.models.entrance import Entrance, count_patches
from fedmjp.patches import from_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

MJP: frozenset[Mark] = frozenset({"masked", "shuffled"})
LIKE_NOISE: frozenset[Mark] = frozenset({"noisy", "rounded"})  # what is pruned away is no noise
HANDLED: frozenset[Mark] = MJP | LIKE_NOISE | {"scaled"}


class ClosedFacts(Attack[Model]):
    """The base of attacks that read the linear facts upload by upload and close them by a prior of pictures."""

    requires: ClassVar[str] = (
        "updates with patch, position and unknown embedding; no more patches in an upload than dimensions; "
        "an image size that the prior knows"
    )
    stack = 1
    any_steps = True  # facts are linear in the gradients, which steps add up
    uses_natural_patches = True

    def tensors(self, model: Model) -> Sequence[str]:
        """Name the gradients of patch, position and, of a defended model, unknown embedding."""
        return required_tensors(model)

    def requirement(self, model: Model, threat: ThreatModel) -> str | None:
        """Refuse too few dimensions, a mask that cannot be read, and sizes without statistics."""
        return refusal(model, threat) or size_refusal(model.pixels)

    def handles(self, model: Model, threat: ThreatModel) -> frozenset[Mark]:
        """Name what MJP does, a factor of the whole update, and what disturbs equations like noise.

        Only equations that are left over tell the loudness of noise.
        """
        del threat
        measurable = count_patches(model) < len(model.get_parameter(names.PATCH_WEIGHT))
        marks = HANDLED if measurable else HANDLED - LIKE_NOISE
        return marks if model.defended else marks - MJP

    @abstractmethod
    def reconstruct(
        self, upload: Upload, model: Model, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        """Attack an upload that was checked."""


class MjpPrior(ClosedFacts[Entrance]):
    """The most natural of all pictures that agree with the linear facts of an upload.

    An upload of MJP states M linear combinations short of everything about each patch in its true
    place, M being the number of masked patches (``fedmjp.attacks.mjp.facts``). The shuffle is not in it:
    what comes out is the clean picture in its own order, not the shuffled one. Among the pictures
    that agree, the attack takes the one of least energy under a Gaussian prior of whole pictures
    (``fedmjp.attacks.mjp.closing``): what the facts leave open of a patch is filled so that it continues
    its neighbours.

    Without a mask the facts are the whole picture, and the attack is ``patch_embedding``.

    Example:
        >>> import fedmjp
        >>> network = {"name": "deit_tiny", "image_size": 64, "patch_size": 8}
        >>> scenario = fedmjp.Scenario(model=network, defences="mjp:mask_ratio=0.1")
        >>> exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=64))
        >>> result = fedmjp.attack("mjp_prior", exchange.upload, scenario)
        >>> fedmjp.score(result, exchange.private, setting="c", metrics=("psnr",))["psnr"].item() > 15
        True
    """

    name = "mjp_prior"
    paper = "follows from the definition of MJP; used in fedmjp"
    summary = "linear facts of one MJP upload, closed by a prior of natural pictures; no pass through the network"
    requires = f"one picture per upload; {ClosedFacts.requires}"
    exploits = "MJP leaves everything but a span of the masked patches exact, and hides no place: pictures are smooth"

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Refuse uploads of several pictures, besides."""
        if threat.batch_size != 1:
            return f"reads uploads of one picture: of {threat.batch_size}, the gradients at the tokens are a sum"
        return super().requirement(model, threat)

    @override
    def reconstruct(
        self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        del generator  # nothing is drawn
        facts = linear_facts(upload, model, threat)
        patches, compared = close_best(of_one_upload(facts), facts.mask, upload, model, threat)
        return Reconstruction(
            picture(patches, model),
            {
                "masked_patches": float(facts.mask.sum()),
                "contrast": facts.contrast,
                "energy_per_value": _energy(patches, model) / patches.numel(),
                **compared,
            },
        )


def _energy(patches: Tensor, model: Entrance) -> float:
    """Return the picture's energy under the prior, about one per value for a usual picture."""
    prior = NaturalPictures.for_model(model)
    image = from_patches(patches[None].float(), model.pixels, model.patch_size)[0] - prior.mean[:, None, None]
    return float((image * prior.slope(image)).sum())
