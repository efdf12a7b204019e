"""MJP's dense absolute localisation (DAL): where a patch lies, regressed from its position embedding."""

from typing import Literal

import torch
from torch import Tensor, nn

from fedmjp.errors import BadInputError

PCA_ITERATIONS = 5
COORDINATES = 2


class LocalisationRegressor(nn.Module):
    """From position embeddings to rows and columns (MJP, section 4.2, Eq. 1), as ``pca``, ``linear`` or ``nonlinear``.

    Positions are indices of the grid, row first, from 0; the official code does not scale them either.
    "pca" has no weights: it projects on the first two principal directions of the embeddings at hand
    (``torch.pca_lowrank``, which draws from torch's global generator, with 5 iterations as in the official
    code). "nonlinear" is so many linear ``layers`` with ReLU between.
    """

    def __init__(self, kind: Literal["pca", "linear", "nonlinear"], dim: int, *, layers: int = 3) -> None:
        super().__init__()
        self.kind = kind
        self.layers: nn.Module
        if kind == "nonlinear":
            hidden = [module for _ in range(layers - 1) for module in (nn.Linear(dim, dim), nn.ReLU())]
            self.layers = nn.Sequential(*hidden, nn.Linear(dim, COORDINATES))
        elif kind == "linear":
            self.layers = nn.Linear(dim, COORDINATES)
        else:
            self.layers = nn.Identity()
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):  # as timm draws a transformer's, and the official code these
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Predict positions.

        Args:
            embeddings: (patches, dim).

        Returns:
            (patches, 2).
        """
        if self.kind == "pca":
            directions = torch.pca_lowrank(embeddings, q=COORDINATES, niter=PCA_ITERATIONS)[2]
            return embeddings @ directions
        predicted: Tensor = self.layers(embeddings)
        return predicted


def grid_positions(patches: int, *, device: torch.device | None = None) -> Tensor:
    """Compute row and column of every patch of a square grid.

    Args:
        patches: How many, a square number.
        device: Where the result lies.

    Returns:
        (patches, 2) float32, from 0.

    Raises:
        BadInputError: If the number is no square.
    """
    side = round(patches**0.5)
    if side * side != patches:
        raise BadInputError(f"{patches} patches are no square grid")
    places = torch.arange(patches, device=device)
    return torch.stack([places // side, places % side], dim=1).float()


def localisation_loss(regressor: LocalisationRegressor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the mean absolute difference of predicted and true positions of unmasked patches (Eq. 2), a scalar.

    Of a batch it is the mean over its pictures, where those without an unmasked patch count as 0.

    Args:
        regressor: Predicts positions.
        positions: (patches, dim), the position embedding without the rows of class tokens.
        mask: (batch or 1, patches) bool; one row serves the whole batch, None masks nothing.
    """
    targets = grid_positions(len(positions), device=positions.device)
    if regressor.kind == "pca":
        return _projected_loss(regressor, positions, targets, mask)
    errors: Tensor = (regressor(positions) - targets).abs().mean(dim=1)
    if mask is None:
        return errors.mean()
    unmasked = (~mask).to(errors)
    per_picture: Tensor = (unmasked @ errors) / unmasked.sum(dim=1).clamp(min=1)
    return per_picture.mean()


def _projected_loss(
    regressor: LocalisationRegressor, positions: Tensor, targets: Tensor, mask: Tensor | None
) -> Tensor:
    """Compute the loss of "pca", whose projection depends on which embeddings take part."""
    keeps = [torch.ones(len(positions), dtype=torch.bool)] if mask is None else [~row for row in mask]
    enough = [keep for keep in keeps if int(keep.sum()) > COORDINATES]
    losses = [(regressor(positions[keep]) - targets[keep]).abs().mean() for keep in enough]
    return torch.stack(losses).mean() if losses else positions.new_zeros(())
