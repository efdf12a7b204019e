"""The flattest picture among all that the uploads leave open: for drawings, print and shadings.

Of such pictures the Gaussian prior of natural pictures (``fedmjp.attacks.mjp.closing``) is wrong: they are flat but
for a few
edges, which it blurs. The sum of the lengths of all pixel differences, total variation, lets edges stand. Values
outside of [0, 1] are no pixels. L-BFGS searches from another picture on, with corners that are rounded less and less.
"""

import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.models.entrance import Entrance
from fedmjp.patches import from_patches

ROUNDED = (0.1, 0.03, 0.01)  # differences below these count by their square
STEPS = 20  # at each of them
OUTSIDE = 30.0  # weight of the squares of what lies outside of [0, 1]
REMEMBERED = 10  # steps that L-BFGS makes its picture of the curvature from


def flatten(affine: AffinePatches, start: Tensor, model: Entrance) -> Tensor:
    """Return the picture of least total variation among those that the uploads leave open.

    Args:
        affine: What the uploads state.
        start: (patches, values) float64, in the network's input space.
        model: States sizes and normalisation.

    Returns:
        (patches, values) float64, in the network's input space.
    """
    if not len(affine.basis):
        return affine.known
    basis, stated = affine.basis.float(), affine.known.float()
    along = ((start - affine.known) @ affine.basis.mT).float().requires_grad_()

    def unevenness(rounded: float) -> Tensor:
        image = from_patches((stated + along @ basis)[None], model.image_size, model.patch_size)[0]
        pixels = image * model.std + model.mean
        lengths = [
            (pixels.diff(dim=dim).square().sum(dim=0) + rounded**2).sqrt().sum()
            for dim in (1, 2)  # rows and columns
        ]
        return sum(lengths, OUTSIDE * (pixels - pixels.clamp(0, 1)).square().sum())

    for rounded in ROUNDED:
        search = torch.optim.LBFGS([along], max_iter=STEPS, history_size=REMEMBERED, line_search_fn="strong_wolfe")

        def evaluate(search: torch.optim.LBFGS = search, rounded: float = rounded) -> Tensor:
            search.zero_grad()
            with torch.enable_grad():
                value = unevenness(rounded)
                value.backward()  # type: ignore[no-untyped-call]
            return value

        search.step(evaluate)  # type: ignore[no-untyped-call]
    return affine.known + along.detach().double() @ affine.basis
