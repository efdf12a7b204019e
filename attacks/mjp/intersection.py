"""Several MJP uploads of one picture under independent masks: linear algebra recovers it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import picture
from fedmjp.attacks.mjp import batches
from fedmjp.attacks.mjp.affine import complete, of_several_uploads
from fedmjp.attacks.mjp.choice import close_best
from fedmjp.attacks.mjp.closing import close
from fedmjp.attacks.mjp.facts import BLURRED, LinearFacts, linear_facts
from fedmjp.attacks.mjp.linking import link, same_but_for_noise
from fedmjp.attacks.mjp.prior import ClosedFacts
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.entrance import Entrance
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

STEP = 1 / 255  # of a channel of 8 bits
AGREED = 0.05  # root mean square by which two ways to one picture differ at most, in the network's input space


class MjpIntersection(ClosedFacts[Entrance]):
    """The intersection of what several uploads of one picture leave open.

    One upload of MJP leaves every patch open along the span of its masked patches, and along nothing
    else (``fedmjp.attacks.mjp.facts``). A further upload of the same picture under another mask leaves it open
    along another span. Together only their intersection is open: the span of the patches that were
    masked in every upload, and nothing once every patch was seen (``fedmjp.attacks.mjp.affine``); patches that
    look alike, as in a black bar, count as one, which is masked as long as any of them is. This is
    exact, in the true order of the patches, and holds whatever the weights were in each upload: a client
    that trains on a picture for several epochs sends exactly this.

    Which uploads of a client are of the picture, the attack finds out itself (``fedmjp.attacks.mjp.linking``).
    What they leave open is closed by a prior of natural pictures (``fedmjp.attacks.mjp.closing``). With one
    upload it is ``mjp_prior``.

    Uploads that defences disturb are read with a prior of patches (facts 4 and 9), and what noise
    blurs of a span counts as open. Those without a mask are read as one: of the same weights they are the same but
    for noise, and their mean is taken; of others they are further equations. Where clients take random crops, each
    upload shows another one: only what is linked by its equations is joined then.

    Uploads of pictures that differ by more than noise are not joined, however little it is. Where that cannot be
    decided they are not joined either: ``uploads_undecided`` counts these. Any that was joined may be of a
    copy that differs by an exposure of ``unnoticed_exposure``, in steps of 1/255, or less; 255 says that nothing is
    known.

    In *batches* each picture is found by the uploads that show it in other company (``fedmjp.attacks.mjp.batches``),
    as long as all patches of an upload are fewer than the dimensions of a token, and what two uploads leave open
    is less than a patch.
    """

    name = "mjp_intersection"
    paper = "follows from the definition of MJP; used in fedmjp"
    summary = "linear facts of all MJP uploads of one picture, linked and intersected; the rest closed by a prior"
    exploits = "masks drawn anew for every upload hide other patches each time; what one mask hides the next shows"
    reads_others = True

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Refuse batches whose uploads cannot be told by whom they show, besides."""
        several = threat.batch_size > 1
        return super().requirement(model, threat) or (batches.refusal(model, threat.batch_size) if several else None)

    def handles(self, model: Entrance, threat: ThreatModel) -> frozenset[Mark]:
        """Leave out disturbed equations of batches: which uploads share a picture is then unsure."""
        handled = super().handles(model, threat)
        return handled - BLURRED if threat.batch_size > 1 else handled

    def caveat(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Warn that batches need changing company, and masks that leave enough."""
        del model
        if threat.batch_size == 1:
            return None
        warning = f"{self.name}: pictures that are always shown in the same company stay a mixture, as do all if masks "
        warning += "make two uploads leave as much open as a patch has values"
        unsure = "; which uploads share a picture is unsure as they are degraded"
        return warning + unsure if threat.marks & BLURRED else warning

    @override
    def reconstruct(
        self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        del generator  # nothing is drawn
        read = [(upload, linear_facts(upload, model, threat)), *_of_others(upload.others, model, threat)]
        if upload.num_examples > 1:
            return _of_batch([facts for _, facts in read], upload.num_examples, model)
        return _intersect(read, model, threat)


def _of_others(siblings: Sequence[Upload], model: Entrance, threat: ThreatModel) -> list[tuple[Upload, LinearFacts]]:
    """Read the facts of further uploads; one with every patch masked states none."""
    read = []
    for sibling in siblings:
        with suppress(AttackFailedError):
            read.append((sibling, linear_facts(sibling, model, threat)))
    return read


def _of_batch(facts: Sequence[LinearFacts], pictures: int, model: Entrance) -> Reconstruction:
    members = batches.members(facts, pictures, model)
    return Reconstruction(
        torch.cat([picture(member.patches, model) for member in members]),
        {
            "uploads_kept": float(len(facts)),
            "uploads_linked": sum(member.uploads for member in members) / len(members),
            "unknowns_per_patch": sum(member.open for member in members) / len(members),
        },
    )


def _intersect(read: Sequence[tuple[Upload, LinearFacts]], model: Entrance, threat: ThreatModel) -> Reconstruction:
    first, stated = read[0]
    repeated = [] if threat.crop_scale else read[1:]
    same = [place for place, (sibling, _) in enumerate(repeated, 1) if same_but_for_noise(first, sibling, threat)]
    links = link([facts for _, facts in read], same)
    uploads = [read[index] for index in links.same]
    whole = [upload for upload, facts in uploads if not facts.mask.any()]
    facts = [facts for _, facts in uploads if facts.mask.any() or len(whole) == 1]
    if len(whole) > 1:
        facts.append(linear_facts(_as_one(whole), model, threat))
    affine = of_several_uploads(facts)
    if len(facts) > 1 and any(part.errs for part in facts):
        facts = _completed(facts, close(affine, model))
        affine = of_several_uploads(facts)
    misfit = torch.stack([(affine.fixed - affine.fixed @ part.open.mT @ part.open - part.stated) for part in facts])
    patches, compared = close_best(affine, stated.mask, first, model, threat)
    return Reconstruction(
        picture(patches, model),
        {
            "uploads_kept": float(len(read)),
            "uploads_linked": float(len(uploads)),
            "uploads_undecided": float(len(links.undecided)),
            "unnoticed_exposure": min(links.unnoticed * float(model.std.mean()) / STEP, 1 / STEP),
            "masked_in_all": float(torch.stack([part.mask for part in facts]).all(dim=0).sum()),
            "unknowns_per_patch": float(len(affine.basis)),
            "residual": float(misfit.square().mean().sqrt()),
            **compared,
        },
    )


def _completed(facts: Sequence[LinearFacts], guess: Tensor) -> list[LinearFacts]:
    """Take the errors of fact 10 out of the uploads; return the first alone, as it is, if they do not tell these.

    They tell them if two guesses lead to the same picture. Two uploads never do: any two directions of the plane in
    which they differ would explain it.
    """
    if len(facts) == 2:
        return list(facts[:1])
    ways = [complete(facts, start) for start in (guess, torch.zeros_like(guess))]
    first, second = (of_several_uploads(completed).fixed for completed in ways)
    return ways[0] if (first - second).square().mean() <= AGREED**2 else list(facts[:1])


def _as_one(uploads: Sequence[Upload]) -> Upload:
    """Merge unmasked uploads of one picture: the mean for each set of weights, as equations one below the other.

    Equations of other weights are scaled to be as loud. The width of the tensors is then that of all together.
    """
    means = []
    for weights in dict.fromkeys(upload.weights for upload in uploads):
        same = [upload.tensors for upload in uploads if upload.weights == weights]
        mean = {name: torch.stack([tensors[name].double() for tensors in same]).mean(dim=0) for name in same[0]}
        scale = mean[names.PATCH_WEIGHT].square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        means.append({name: tensor / scale for name, tensor in mean.items()})
    dimension = {names.PATCH_WEIGHT: 0}  # the last of the others
    joined = {name: torch.cat([mean[name] for mean in means], dim=dimension.get(name, -1)) for name in means[0]}
    return replace(uploads[0], tensors=joined)
