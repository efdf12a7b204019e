"""MJP's localisation loss (DAL) taken out of an upload: the server can compute its gradient itself.

The loss depends on the weights that the server had sent and on which patches were masked, nothing else of the
picture. Its gradient at the position embedding of a masked patch is zero, like the classification loss's, so
that the masked patches are read off the upload.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload


def without_localisation(upload: Upload, model: VitClassifier, weight: float) -> Upload:
    """The upload as it would be without the localisation loss.

    Args:
        upload: A gradient of pictures under one mask.
        model: With the weights that it was computed with, and a localisation regressor that has weights: what
            "pca" does depends on what the client draws.
        weight: Of the localisation loss.
    """
    mask = _mask(upload, model) if model.defended else None
    parameters = {name: value for name, value in model.named_parameters() if name in upload.tensors}
    with torch.enable_grad():
        loss = weight * model.localisation_loss(mask)
        found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    gradient = dict(zip(parameters, found, strict=True))
    return replace(upload, tensors={name: value - gradient[name].to(value) for name, value in upload.tensors.items()})


def _mask(upload: Upload, model: VitClassifier) -> Tensor:
    """(1, patches): where a position embedding was not used."""
    positions = upload.tensors[names.POSITION_EMBEDDING][0, model.prefix_tokens :]
    return (positions == 0).all(dim=1)[None].to(model.mean.device)
