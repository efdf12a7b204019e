"""What may follow an attack: work on its pictures with what the upload tells besides."""

from collections.abc import Sequence
from typing import Literal

import torch

from attacks.base import on_device
from attacks.reassembly import reassemble
from attacks.token_gradients import positions_refusal
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches, to_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

Stage = Literal["reassembly"]
REASSEMBLY: Stage = "reassembly"
# What it reads of an upload.
TENSORS = (names.POSITION_EMBEDDING,)


def stage_refusal(model: VitClassifier, threat: ThreatModel) -> str | None:
    """Which requirement of reassembly this model or threat model fails; None if it applies."""
    if threat.batch_size != 1:
        return f"reassembly needs uploads of one picture: of {threat.batch_size}, no upload tells the masks apart"
    if not threat.individual_updates:
        return "reassembly needs each client's own update: in a sum over clients, other masks fill the zeros of each"
    if threat.noise:
        return f"reassembly reads masked places off gradients of exactly zero: noise of {threat.noise:g} RMS hides them"
    return positions_refusal(model)


def stage_caveat(model: VitClassifier) -> str | None:
    """What a reader must know of its scores under this model; None if nothing."""
    if model.defended:
        return None
    return "reassembly: without an unknown embedding, no upload tells which patches were moved; none is put elsewhere"


def reassembled(
    made: Sequence[Reconstruction], uploads: Sequence[Upload], model: VitClassifier, *, generator: torch.Generator
) -> list[Reconstruction]:
    """Pictures in shuffled order, in the order in which their patches fit together.

    The masked patches are those without a gradient of their own position embedding.

    Args:
        made: What the attack made of ``uploads``, one picture each.
        uploads: With ``TENSORS``.
        model: That the server had sent.
        generator: Source of randomness, on the CPU.
    """
    return [_one(each, upload, model, generator) for each, upload in zip(made, uploads, strict=True)]


def _one(made: Reconstruction, upload: Upload, model: VitClassifier, generator: torch.Generator) -> Reconstruction:
    rows = on_device(upload, names.POSITION_EMBEDDING, model)[0, model.prefix_tokens :]
    hole = (rows == 0).all(dim=1) & model.defended
    patches = to_patches(made.images, model.patch_size)[0]
    own = torch.Generator().manual_seed(generator.initial_seed())  # a result does not depend on its neighbours
    source = reassemble(patches, hole, model.grid, model.patch_size, generator=own)
    moved = float((source != torch.arange(len(source))).sum())
    images = from_patches(patches[None, source], model.image_size, model.patch_size)
    return Reconstruction(images, {**made.diagnostics, "moved_patches": moved})
