"""MJP's localisation loss (DAL) taken out of an upload: the server can compute its gradient itself.

The loss depends on the weights that the server had sent and on which patches were masked, nothing else of the
picture. Its gradient at the position embedding of a masked patch is zero, like the classification loss's, so
that the masked patches are read off the upload.
"""

from dataclasses import replace

import torch

from fedmjp.attacks.mask import read_mask
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel


def without_localisation(upload: Upload, model: VitClassifier, weight: float, threat: ThreatModel) -> Upload:
    """Take the localisation loss of this weight out of the gradient of pictures under one mask.

    Args:
        upload: The gradient.
        model: With the weights that the upload was computed with, and a localisation regressor that has weights: what
            "pca" does depends on what the client draws.
        weight: The weight of the localisation loss.
        threat: States the defences.

    Raises:
        AttackFailedError: If the upload leaves in doubt which patches were masked.
    """
    mask = read_mask(upload, model, threat)[None] if model.defended else None
    parameters = {name: value for name, value in model.named_parameters() if name in upload.tensors}
    with torch.enable_grad():
        loss = weight * model.localisation_loss(mask)
        derivatives = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    gradient = dict(zip(parameters, derivatives, strict=True))
    return replace(upload, tensors={name: value - gradient[name].to(value) for name, value in upload.tensors.items()})
