"""Stages after an attack, which work on its pictures with what the upload tells besides."""

from typing import Any, Literal

import torch

from fedmjp.attacks.base import Attack
from fedmjp.attacks.mask import mask_refusal, read_mask
from fedmjp.attacks.reassembly import reassemble
from fedmjp.attacks.token_gradients import positions_refusal
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches, to_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

Stage = Literal["reassembly"]
TENSORS = (names.POSITION_EMBEDDING,)  # what it reads of an upload


def unstaged(attack: Attack[Any, Any], stage: Stage) -> str | None:
    """Say why a stage cannot follow an attack, on whatever it is run; None if it can.

    Args:
        attack: Any attack.
        stage: The stage that is to follow.
    """
    if attack.reveals != "pictures":
        return f"{stage} works on pictures; {attack.name} reveals {attack.reveals}"
    return None


def stage_refusal(model: VitClassifier, threat: ThreatModel) -> str | None:
    """Say which requirement of reassembly this model or threat model fails; None if it applies.

    Args:
        model: The model that the server had sent.
        threat: The knowledge that the attacker is granted.
    """
    if threat.batch_size != 1:
        return f"reassembly needs uploads of one picture: of {threat.batch_size}, no upload tells the masks apart"
    if threat.pipeline.clients > 1:
        return "reassembly needs each client's own update: in a sum over clients, other masks fill the zeros of each"
    unread = mask_refusal(model, threat)
    return f"reassembly reads which patches were masked: {unread}" if unread else positions_refusal(model)


def stage_caveat(model: VitClassifier) -> str | None:
    """Say what a reader must know of its scores under this model; None if nothing.

    Args:
        model: The model that the server had sent.
    """
    if model.defended:
        return None
    return "reassembly: without an unknown embedding, no upload tells which patches were moved; none is put elsewhere"


def reassembled(
    reconstruction: Reconstruction,
    upload: Upload,
    model: VitClassifier,
    threat: ThreatModel,
    generator: torch.Generator,
) -> Reconstruction:
    """Put the masked patches of a reconstruction into the order in which they fit.

    Args:
        reconstruction: The result for an upload of one picture.
        upload: States which patches were masked.
        model: The model that the server had sent.
        threat: The knowledge that the attacker is granted.
        generator: Draws the parts that are opened again.

    Raises:
        AttackFailedError: If the upload leaves in doubt which patches were masked.
    """
    patches, hole = to_patches(reconstruction.images, model.patch_size)[0], read_mask(upload, model, threat)
    source = reassemble(patches, hole, model.grid, model.patch_size, generator=generator)
    moved = float((source != torch.arange(len(source))).sum())
    images = from_patches(patches[None, source], model.image_size, model.patch_size)
    return Reconstruction(images, {**reconstruction.diagnostics, "moved_patches": moved})
