"""Several MJP uploads of one picture under independent masks: linear algebra recovers it."""

from collections.abc import Sequence

import torch

from attacks.mjp.affine import of_one_upload, of_several_uploads
from attacks.mjp.closed_facts import ClosedFacts
from attacks.mjp.closing import close
from attacks.mjp.facts import facts_under
from attacks.mjp.linking import linked
from attacks.pictures import picture
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel


class MjpIntersection(ClosedFacts):
    """Intersect what several uploads of one picture leave open.

    One upload of MJP leaves every patch open along the span of its masked patches, and along nothing
    else (``attacks.mjp.facts``). A further upload of the same picture under another mask leaves it open
    along another span. Together only their intersection is open: the span of the patches that were
    masked in every upload, and nothing once every patch was seen (``attacks.mjp.affine``). This is
    exact, in the true order of the patches, and holds whatever the weights were in each upload: a client
    that trains on a picture for several epochs sends exactly this.

    Which uploads of a client are of the picture, the attack finds out itself (``attacks.mjp.linking``).
    What they leave open is closed by a prior of natural pictures (``attacks.mjp.closing``). With one
    upload it is ``mjp_prior``.

    Uploads that the protocol degrades are read with a prior of patches (facts 4 and 9), and what noise
    blurs of a span counts as open.

    *Batches* are refused. If all pictures of a batch had one mask, an upload would state
    (I - P) x_t for each of them alike, with the differences between them in the span as well, as long as
    batch x patches do not exceed the dimensions: a batch that recurs as a whole stays a mixture, while a
    picture that recurs among others intersects as it does alone. Here each picture has its own mask, and
    then fact 4 fails wherever one picture is masked and another is not.
    """

    name = "mjp_intersection"
    paper = "follows from the definition of MJP; used in fedmjp"
    summary = "linear facts of all MJP uploads of one picture, linked and intersected; the rest closed by a prior"
    exploits = "masks drawn anew for every upload hide other patches each time; what one mask hides the next shows"
    reads_others = True

    def _reconstruct(
        self,
        uploads: Sequence[Upload],
        model: VitClassifier,
        threat: ThreatModel,
        *,
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        del generators  # nothing is drawn
        return [_intersect(upload, model, threat) for upload in uploads]


def _intersect(upload: Upload, model: VitClassifier, threat: ThreatModel) -> Reconstruction:
    all_facts = [facts_under(threat, each, model) for each in (upload, *upload.others)]
    facts = [all_facts[index] for index in linked(all_facts)]
    affine = of_several_uploads(facts) if len(facts) > 1 else of_one_upload(facts[0])
    left = torch.stack([(affine.known - affine.known @ each.basis.mT @ each.basis - each.known) for each in facts])
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
