"""What the linear facts leave open of the pictures behind one upload, as unknowns that are alike.

Patch t of a picture is known[t] + c_t^T B with unknown c_t (``fedmjp.attacks.mjp.affine``). Along some directions
natural
pictures vary a thousand times as much as along others, and search in the c_t would take each for as likely. The prior
of pictures (``fedmjp.attacks.natural_pictures``) has a precision of all c_t, L L^T. The unknowns u = L^T c have
variance 1
each, and the most natural picture is u = 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import vmap

from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.mjp.closing import close
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.models.entrance import Entrance, count_patches
from fedmjp.patches import from_patches, to_patches

LEAST = 1e-6  # of the largest precision of a c_t: what float32 resolves of it
CHUNK = 64  # directions whose precision is computed at a time


@dataclass(frozen=True)
class OpenSpace:
    """Patches are ``natural + (root u) basis``, each picture with unknowns of its own."""

    natural: Tensor  # (patches, values) float64, in the network's input space, the most natural picture
    basis: Tensor  # (rank, values) float64, orthonormal rows
    root: Tensor  # (patches * rank, unknowns of a picture) float64

    @staticmethod
    def of(affine: AffinePatches, model: Entrance) -> "OpenSpace":
        """Build the space of the pictures that the facts allow."""
        if not len(affine.basis):
            return OpenSpace(affine.fixed, affine.basis, affine.fixed.new_zeros(0, 0))
        precision = _precision(affine, model)
        precision.diagonal().add_(LEAST * precision.diagonal().max())
        factor = torch.linalg.cholesky(precision)
        root = torch.linalg.solve_triangular(factor.mT, torch.eye(len(factor)).to(factor), upper=True)
        return OpenSpace(close(affine, model), affine.basis, root)

    @staticmethod
    def of_shown(directions: Tensor, prior: "Prior") -> "OpenSpace":
        """Build the space of some directions of every patch, whatever stands in the others.

        Args:
            directions: (rank, values), orthonormal.
            prior: Of natural pictures.
        """
        covariance = prior.covariance.view(*prior.mean.shape, *prior.mean.shape)
        along = torch.einsum("iv,avbw,jw->aibj", directions, covariance, directions).flatten(2).flatten(0, 1)
        root = torch.linalg.cholesky(along.flip(0, 1)).flip(0, 1)  # an upper factor, as above
        return OpenSpace(prior.mean, directions, root)

    @property
    def alike(self) -> "OpenSpace":
        """Return the same patches, each independent of the others and as natural in one place as in another."""
        count, rank = len(self.natural), len(self.basis)
        covariance = (self.root @ self.root.mT).view(count, rank, count, rank)
        of_one = torch.einsum("aiaj->ij", covariance) / count
        root = torch.linalg.cholesky(of_one.flip(0, 1)).flip(0, 1).contiguous()
        return OpenSpace(self.natural, self.basis, torch.kron(torch.eye(count).to(root), root))

    def coarse(self, unknowns: Tensor, count: int) -> "tuple[OpenSpace, Tensor]":
        """Return the space of the directions in which natural pictures vary most, and a picture's unknowns in it.

        Args:
            unknowns: (unknowns,) of the picture, which the space contains.
            count: Directions.
        """
        leading = self._by_variance[:, -count:]
        along = leading.mT @ unknowns
        base_picture = self.patches(unknowns - leading @ along)[0]
        return OpenSpace(base_picture, self.basis, self.root @ leading), along

    @cached_property
    def _by_variance(self) -> Tensor:
        """Return (unknowns, unknowns) orthonormal directions, those last along which patches vary most."""
        axes: Tensor = torch.linalg.eigh(self.root.mT @ self.root).eigenvectors
        return axes

    def patches(self, unknowns: Tensor) -> Tensor:
        """Return (pictures, patches, values) in the unknowns' precision.

        Args:
            unknowns: (pictures * those of one picture,).
        """
        if not len(self.basis):
            return self.natural[None].to(unknowns.dtype)
        root, natural, basis = (tensor.to(unknowns.dtype) for tensor in (self.root, self.natural, self.basis))
        along = unknowns.view(-1, root.shape[1]) @ root.mT
        return natural + along.view(-1, len(natural), len(basis)) @ basis

    def directions(self, chunk: int) -> Iterator[Tensor]:
        """Yield (some, patches, values) float32: how a picture's patches change with each unknown.

        Args:
            chunk: At a time.
        """
        basis = self.basis.float()
        for some in torch.split(self.root.mT, chunk):
            yield some.float().view(len(some), len(self.natural), len(self.basis)) @ basis

    def unknowns(self, patches: Tensor) -> Tensor:
        """Solve for the unknowns of the nearest pictures, which ``patches`` undoes.

        Args:
            patches: (pictures, patches, values) float64.
        """
        along = ((patches - self.natural) @ self.basis.mT).flatten(1)
        nearest: Tensor = torch.linalg.solve_triangular(self.root, along.mT, upper=True).mT.flatten()
        return nearest


@dataclass(frozen=True)
class Prior:
    """What natural pictures are, written out: a normal distribution of all values."""

    mean: Tensor  # (patches, values) float64
    precision: Tensor  # (patches * values, patches * values) float64

    @staticmethod
    def of(model: Entrance) -> "Prior":
        """Read it in the network's input space; the last one is cached, because it takes seconds."""
        normalised = torch.cat([model.mean.flatten(), model.std.flatten()])
        kind = (model.pixels, model.patch_size, normalised.device, *normalised.tolist())
        if kind not in _LAST:
            _LAST.clear()
            _LAST[kind] = Prior._written_out(model)
        return _LAST[kind]

    @cached_property
    def covariance(self) -> Tensor:
        """Return the inverse of the precision."""
        inverse: Tensor = torch.linalg.inv(self.precision)
        return inverse

    @staticmethod
    def _written_out(model: Entrance) -> "Prior":
        mean = NaturalPictures.for_model(model).mean.double().repeat_interleave(model.patch_size**2)
        values = torch.eye(len(mean)).to(mean)
        precision = _precision(AffinePatches(mean.expand(count_patches(model), -1), values), model)
        precision.diagonal().add_(LEAST * precision.diagonal().max())
        return Prior(mean.expand(count_patches(model), -1), precision)


_LAST: dict[tuple[object, ...], Prior] = {}


def _precision(affine: AffinePatches, model: Entrance) -> Tensor:
    """Return (patches * rank, patches * rank) of the prior of pictures, along the basis."""
    prior, patches, rank = NaturalPictures.for_model(model), len(affine.fixed), len(affine.basis)
    basis = affine.basis.float()

    def along(direction: Tensor) -> Tensor:
        values = direction.view(patches, rank) @ basis
        slope = prior.slope(from_patches(values[None], model.pixels, model.patch_size)[0])
        return (to_patches(slope[None], model.patch_size)[0] @ basis.mT).flatten()

    precision = vmap(along, chunk_size=CHUNK)(torch.eye(patches * rank, device=basis.device)).double()
    return (precision + precision.mT) / 2
