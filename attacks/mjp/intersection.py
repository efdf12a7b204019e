"""Several MJP uploads of one picture under independent masks: linear algebra recovers it."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from attacks.base import picture
from attacks.mjp import batches
from attacks.mjp.affine import of_several_uploads
from attacks.mjp.closing import close
from attacks.mjp.facts import BLURRED, LinearFacts, linear_facts
from attacks.mjp.linking import linked
from attacks.mjp.prior import ClosedFacts
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.models.entrance import Entrance
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel


class MjpIntersection(ClosedFacts[Entrance]):
    """Intersect what several uploads of one picture leave open.

    One upload of MJP leaves every patch open along the span of its masked patches, and along nothing
    else (``attacks.mjp.facts``). A further upload of the same picture under another mask leaves it open
    along another span. Together only their intersection is open: the span of the patches that were
    masked in every upload, and nothing once every patch was seen (``attacks.mjp.affine``); patches that
    look alike, as in a black bar, count as one, which is masked as long as any of them is. This is
    exact, in the true order of the patches, and holds whatever the weights were in each upload: a client
    that trains on a picture for several epochs sends exactly this.

    Which uploads of a client are of the picture, the attack finds out itself (``attacks.mjp.linking``).
    What they leave open is closed by a prior of natural pictures (``attacks.mjp.closing``). With one
    upload it is ``mjp_prior``.

    Uploads that defences disturb are read with a prior of patches (facts 4 and 9), and what noise
    blurs of a span counts as open.

    Of *batches* each picture is found by the uploads that show it in other company (``attacks.mjp.batches``),
    as long as all patches of an upload are fewer than the dimensions of a token, and what two uploads leave open
    is less than a patch.
    """

    name = "mjp_intersection"
    paper = "follows from the definition of MJP; used in fedmjp"
    summary = "linear facts of all MJP uploads of one picture, linked and intersected; the rest closed by a prior"
    exploits = "masks drawn anew for every upload hide other patches each time; what one mask hides the next shows"
    reads_others = True

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Of batches, needs uploads that can be told by whom they show, besides."""
        several = threat.batch_size > 1
        return super().requirement(model, threat) or (batches.refusal(model, threat.batch_size) if several else None)

    def handles(self, model: Entrance, threat: ThreatModel) -> frozenset[Mark]:
        """Takes no disturbed equations of batches into account: which uploads share a picture is then unsure."""
        handled = super().handles(model, threat)
        return handled - BLURRED if threat.batch_size > 1 else handled

    def caveat(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Batches need changing company, and masks that leave enough."""
        del model
        if threat.batch_size == 1:
            return None
        told = f"{self.name}: pictures that are always shown in the same company stay a mixture, as do all if masks "
        told += "make two uploads leave as much open as a patch has values"
        unsure = "; which uploads share a picture is unsure as they are degraded"
        return told + unsure if threat.marks & BLURRED else told

    def _one(self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator) -> Reconstruction:
        del generator  # nothing is drawn
        facts = [linear_facts(upload, model, threat), *_of_others(upload.others, model, threat)]
        several = upload.num_examples > 1
        return _of_batch(facts, upload.num_examples, model) if several else _intersect(facts, model)


def _of_others(others: Sequence[Upload], model: Entrance, threat: ThreatModel) -> list[LinearFacts]:
    """Of those that state anything: an upload with every patch masked does not."""
    found = []
    for each in others:
        with suppress(AttackFailedError):
            found.append(linear_facts(each, model, threat))
    return found


def _of_batch(facts: Sequence[LinearFacts], pictures: int, model: Entrance) -> Reconstruction:
    found = batches.members(facts, pictures, model)
    return Reconstruction(
        torch.cat([picture(each.patches, model) for each in found]),
        {
            "uploads_kept": float(len(facts)),
            "uploads_linked": sum(each.uploads for each in found) / len(found),
            "unknowns_per_patch": sum(each.open for each in found) / len(found),
        },
    )


def _intersect(all_facts: Sequence[LinearFacts], model: Entrance) -> Reconstruction:
    facts = [all_facts[index] for index in linked(all_facts)]
    affine = of_several_uploads(facts)
    left = torch.stack([(affine.known - affine.known @ each.open.mT @ each.open - each.stated) for each in facts])
    patches = close(affine, model)
    return Reconstruction(
        picture(patches, model),
        {
            "uploads_kept": float(len(all_facts)),
            "uploads_linked": float(len(facts)),
            "masked_in_all": float(torch.stack([each.mask for each in facts]).all(dim=0).sum()),
            "unknowns_per_patch": float(len(affine.basis)),
            "residual": float(left.square().mean().sqrt()),
        },
    )
