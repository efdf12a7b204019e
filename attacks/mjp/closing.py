"""The most natural, or the flattest, picture among all that the uploads leave open.

Patch t is fixed[t] + c_t^T B with unknown c_t. The Gaussian energy of whole pictures
(``fedmjp.attacks.natural_pictures``) is least where

    B (precision of the picture - mean)_t = 0 for every t,

a symmetric system of patches x unknowns equations. Conjugate gradients solve it. Their preconditioner
is the inverse of the same system without borders: on a torus it is block-circulant over the
grid of patches, and a Fourier transform over the grid leaves one small block per frequency. The torus
is larger than the picture, which keeps opposite borders apart: a handful of steps is enough.

This prior does not fit drawings, print and shadings: they are flat but for a few edges, which it blurs. For them
``flatten`` finds the picture of least total variation, the sum of the lengths of all pixel differences, which lets
edges stand. Values outside of [0, 1] are no pixels. L-BFGS searches from another picture on, with corners that are
rounded less and less.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.models.entrance import Entrance
from fedmjp.patches import from_patches, to_patches

STEPS = 50
PRECISE = 3e-3  # of the first error, in the norm of the energy; 1e-2 gives the same PSNR to 0.05 dB
# Of the system's mean diagonal: float32 does not resolve smaller parts, and a preconditioner need not.
RIDGE = 1e-6
ROUNDED = (0.1, 0.03, 0.01)  # differences below these count by their square
FLAT_STEPS = 20  # at each of them
OUTSIDE = 30.0  # weight of the squares of what lies outside of [0, 1]
REMEMBERED = 10  # steps that L-BFGS makes its picture of the curvature from


def close(affine: AffinePatches, model: Entrance) -> Tensor:
    """Return the picture of least energy among those that the uploads leave open.

    Args:
        affine: The statement of the uploads.
        model: States the sizes.

    Returns:
        (patches, values) float64, in the network's input space.

    Raises:
        AttackNotApplicableError: If there is no prior for the model's image size.
    """
    if not len(affine.basis):
        return affine.fixed
    prior = NaturalPictures.for_model(model)
    basis = affine.basis.float()

    def slope(patches: Tensor) -> Tensor:
        image = from_patches(patches[None], model.pixels, model.patch_size)[0]
        return to_patches(prior.slope(image)[None], model.patch_size)[0] @ basis.mT

    inverse = solver_on_torus(prior, basis, model)
    mean = prior.mean.repeat_interleave(model.patch_size**2)
    coefficients = conjugate_gradients(
        lambda direction: slope(direction @ basis), -slope(affine.fixed.float() - mean), inverse
    )
    return affine.fixed + coefficients.double() @ affine.basis


def flatten(affine: AffinePatches, start: Tensor, model: Entrance) -> Tensor:
    """Return the picture of least total variation among those that the uploads leave open.

    Args:
        affine: The statement of the uploads.
        start: (patches, values) float64, in the network's input space.
        model: States sizes and normalisation.

    Returns:
        (patches, values) float64, in the network's input space.
    """
    if not len(affine.basis):
        return affine.fixed
    basis, stated = affine.basis.float(), affine.fixed.float()
    along = ((start - affine.fixed) @ affine.basis.mT).float().requires_grad_()

    def unevenness(rounded: float) -> Tensor:
        image = from_patches((stated + along @ basis)[None], model.pixels, model.patch_size)[0]
        pixels = image * model.std + model.mean
        lengths = [
            (pixels.diff(dim=dim).square().sum(dim=0) + rounded**2).sqrt().sum()
            for dim in (1, 2)  # rows and columns
        ]
        return sum(lengths, OUTSIDE * (pixels - pixels.clamp(0, 1)).square().sum())

    for rounded in ROUNDED:
        search = torch.optim.LBFGS([along], max_iter=FLAT_STEPS, history_size=REMEMBERED, line_search_fn="strong_wolfe")

        def evaluate(search: torch.optim.LBFGS = search, rounded: float = rounded) -> Tensor:
            search.zero_grad()
            with torch.enable_grad():
                value = unevenness(rounded)
                value.backward()  # type: ignore[no-untyped-call]
            return value

        search.step(evaluate)  # type: ignore[no-untyped-call]
    return affine.fixed + along.detach().double() @ affine.basis


def solver_on_torus(prior: NaturalPictures, basis: Tensor, model: Entrance) -> Callable[[Tensor], Tensor]:
    """Invert the system on a torus of patches, by frequencies of the grid.

    Args:
        prior: The prior of pictures.
        basis: (unknowns, values), open directions of a patch.
        model: States the sizes.

    Returns:
        A function of residuals (patches, unknowns).
    """
    reach, grid = prior.reach(model.patch_size), model.pixels[0] // model.patch_size  # squares, as the prior is
    size = grid + reach + 1
    system = basis.new_zeros(size, size, len(basis), len(basis))
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            system[down, right] += basis @ prior.between_patches(model.patch_size, down, right) @ basis.mT
    waves = torch.fft.fft2(system, dim=(0, 1)).conj()[:, : size // 2 + 1]
    waves = (waves + waves.mH) / 2
    diagonal = torch.diagonal(waves, dim1=-2, dim2=-1).real
    torch.diagonal(waves, dim1=-2, dim2=-1).add_(RIDGE * diagonal.mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(waves))

    def solve(residual: Tensor) -> Tensor:
        transformed = torch.fft.rfft2(residual.reshape(grid, grid, -1), s=(size, size), dim=(0, 1))
        solved = (inverse @ transformed[..., None])[..., 0]
        whole: Tensor = torch.fft.irfft2(solved, s=(size, size), dim=(0, 1))
        return whole[:grid, :grid].reshape(residual.shape)

    return solve


def conjugate_gradients(
    system: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    steps: int = STEPS,
    precise: float = PRECISE,
) -> Tensor:
    """Solve ``system(x) = right`` from zero.

    Args:
        system: A symmetric positive definite map.
        right: A tensor of any shape.
        precondition: An approximate inverse of the map.
        steps: At most.
        precise: Share of the first error, in its norm, at which it ends.
    """
    solution, residual = torch.zeros_like(right), right
    direction = preconditioned = precondition(residual)
    error = first = (residual * preconditioned).sum()
    for _ in range(steps):
        if error <= precise**2 * first:
            break
        image = system(direction)
        length = error / (direction * image).sum()
        solution, residual = solution + length * direction, residual - length * image
        preconditioned = precondition(residual)
        previous, error = error, (residual * preconditioned).sum()
        direction = preconditioned + (error / previous) * direction
    return solution
