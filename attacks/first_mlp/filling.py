"""Whole pictures of which some patches are stated and others are not at all."""

import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.mjp.closing import close, conjugate_gradients, solver_on_torus
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.models.entrance import Entrance
from fedmjp.patches import from_patches, to_patches

RIDGE = 1e-6  # of the largest strength: the preconditioner of a whole patch need not resolve less


def fill(affine: AffinePatches, missing: Tensor, model: Entrance) -> Tensor:
    """The most natural picture (patches, values) of which patches ``missing`` (patches,) bool are open altogether.

    The other patches are open along the basis alone, as for ``close``. The preconditioner solves these on a torus and
    each missing patch by itself.
    """
    if not missing.any():
        return close(affine, model)
    prior = NaturalPictures.for_model(model)
    basis = affine.basis.float()
    strengths, axes = torch.linalg.eigh(prior.between_patches(model.patch_size, 0, 0).double())
    alone = ((axes / strengths.clamp(min=RIDGE * strengths[-1])) @ axes.mT).float()
    on_torus = solver_on_torus(prior, basis, model) if len(basis) else None

    def slope(patches: Tensor) -> Tensor:
        image = from_patches(patches[None], model.image_size, model.patch_size)[0]
        return open_part(to_patches(prior.slope(image)[None], model.patch_size)[0])

    def open_part(patches: Tensor) -> Tensor:
        return torch.where(missing[:, None], patches, patches @ basis.mT @ basis)

    def precondition(residual: Tensor) -> Tensor:
        solved = torch.zeros_like(residual)
        if on_torus is not None:
            solved = open_part(on_torus(torch.where(missing[:, None], 0, residual) @ basis.mT) @ basis)
        solved[missing] = residual[missing] @ alone
        return solved

    mean = prior.mean.repeat_interleave(model.patch_size**2)
    start = torch.where(missing[:, None], mean, affine.known.float())
    return (start + conjugate_gradients(slope, -slope(start - mean), precondition)).double()
