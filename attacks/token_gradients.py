"""The gradients at the tokens, read off the position embedding's gradient.

The position embedding is added to the tokens, so row i of its gradient is the gradient of the loss at token i. With
MJP, masked tokens use the shared unknown embedding instead, whose gradient is the sum of theirs.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import torch
from pydantic import Field
from torch import Tensor

from fedmjp.attacks.base import on_device
from fedmjp.attacks.linear_systems import least_squares
from fedmjp.attacks.mask import mask_refusal, read_mask
from fedmjp.config import Config
from fedmjp.errors import AttackFailedError, AttackNotApplicableError
from fedmjp.models import names
from fedmjp.models.entrance import Entrance
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel


class Reading(StrEnum):
    """How an attacker that does not know MJP takes the unknown embedding's gradient d_unk.

    It is the sum of the M masked tokens' own gradients, which are not in the upload. Each reading makes another wrong
    system of it. In brackets: what a solver of minimum norm then answers, where a token of gradient d_unk gets u.
    """

    # Every masked row is d_unk / M: one token, shown at every masked place [u].
    ONE_TOKEN = "one_token"  # noqa: S105 (no password)
    COPIED = "copied"  # every masked row is d_unk [u / M]
    SEPARATE = "separate"  # d_unk is the row of a further token that stands at no place [masked places 0]
    ZEROS = "zeros"  # masked rows are zero, as uploaded; d_unk is not used [masked places 0]


class ReadingOptions(Config):
    """How an MJP upload is read; without effect on an undefended model."""

    reading: Reading = Field(
        Reading.ONE_TOKEN,
        description="what the unknown embedding's gradient is taken for: one_token, copied, separate or zeros",
    )


@dataclass(frozen=True)
class TokenGradients:
    """Gradients with respect to the tokens, as far as one upload shows them.

    Attributes:
        prefix: (prefix tokens, dim) float64, the class token's.
        patches: (visible patches, dim) float64, of the patches whose row is known.
        mask: (patches,) bool, True where no row is known.
        without_position: (patches,) bool, True where the token carries the unknown embedding.
        unknown: (0 or 1, dim) float64, the sum over the masked patches, where there are any and the reading uses it.
        reading: How masked patches are taken.
    """

    prefix: Tensor
    patches: Tensor
    mask: Tensor
    without_position: Tensor
    unknown: Tensor
    reading: Reading

    @property
    def unknowns(self) -> Tensor:
        """Return one row (dim,) per token whose value is solved for: ``spread`` puts the values in place."""
        return torch.cat([self.patches, self.unknown])

    def spread(self, values: Tensor) -> Tensor:
        """Return the minimum-norm value (patches, values): its own where visible, what the reading says where masked.

        Args:
            values: Those of the visible patches, then of a token with the unknown embedding's gradient, if any.
        """
        visible, unknown = values[: len(self.patches)], values[len(self.patches) :]
        everywhere = visible.new_zeros(len(self.mask), visible.shape[1])
        everywhere[~self.mask] = visible
        if len(unknown) and self.reading is not Reading.SEPARATE:
            share = 1 / int(self.mask.sum()) if self.reading is Reading.COPIED else 1.0
            everywhere[self.mask] = share * unknown
        return everywhere

    def in_place(self) -> Tensor:
        """Return one row (dim,) per patch as the reading has it, in place, then the separate token's if there is one.

        With a prior every place counts, known or not, so that the system is written out in full.
        """
        rows = self.patches.new_zeros(len(self.mask), self.patches.shape[1])
        rows[~self.mask] = self.patches
        if len(self.unknown) and self.reading is Reading.SEPARATE:
            return torch.cat([rows, self.unknown])
        if len(self.unknown):
            rows[self.mask] = self.unknown / (1 if self.reading is Reading.COPIED else int(self.mask.sum()))
        return rows


def positions_refusal(model: Entrance) -> str | None:
    """Say that a model lacks a position embedding; None if it has one.

    Args:
        model: The model that the server had sent.
    """
    reason = "the model has no position embedding, so that no upload shows the gradients at the tokens"
    return None if model.has_positions else reason


def token_gradients(upload: Upload, model: Entrance, threat: ThreatModel, reading: Reading) -> TokenGradients:
    """Read token gradients and mask out of an upload; of several pictures, their sums and what is masked in all.

    Where nobody can tell which patches were masked, none counts as masked. Attackers who know MJP come elsewhere.

    Args:
        upload: With the gradients of position and unknown embedding.
        model: The model that the server had sent.
        threat: States the defences.
        reading: The meaning that is given to the unknown embedding's gradient.

    Raises:
        AttackNotApplicableError: If an undefended model's upload has no gradient at any patch.
    """
    rows = on_device(upload, names.POSITION_EMBEDDING, model)[0]
    if not model.defended:
        return shown_tokens(rows, model.prefix_tokens)
    prefix, patches = rows[: model.prefix_tokens], rows[model.prefix_tokens :]
    mask = torch.zeros(len(patches), dtype=torch.bool, device=rows.device)
    if mask_refusal(model, threat) is None:
        with suppress(AttackFailedError):
            mask = read_mask(upload, model, threat)
    unknown = rows.new_empty(0, rows.shape[1])
    if mask.any() and reading is not Reading.ZEROS:
        unknown = on_device(upload, names.UNKNOWN_EMBEDDING, model)[None]
    return TokenGradients(prefix, patches[~mask], mask, mask, unknown, reading)


def shown_tokens(rows: Tensor, prefix_tokens: int) -> TokenGradients:
    """Read an undefended model's position-embedding gradient: rows of zeros say nothing of a patch.

    Args:
        rows: (tokens, dim).
        prefix_tokens: Tokens before the patches.

    Raises:
        AttackNotApplicableError: If there is no gradient at any patch.
    """
    prefix, patches = rows[:prefix_tokens], rows[prefix_tokens:]
    mask = (patches == 0).all(dim=1)
    if mask.all():
        raise AttackNotApplicableError("the position-embedding gradient is zero for every patch: nothing to solve for")
    return TokenGradients(prefix, patches[~mask], mask, mask, rows.new_empty(0, rows.shape[1]), Reading.ZEROS)


def oracle_token_gradients(upload: Upload, model: Entrance, threat: ThreatModel) -> TokenGradients:
    """Read every token's gradient, masked or not, as no server sees it: for bounds. The mask is read as in any upload.

    Args:
        upload: With ``ORACLE_TOKEN_GRADIENTS``.
        model: The model that the server had sent.
        threat: States the defences.
    """
    rows = on_device(upload, names.ORACLE_TOKEN_GRADIENTS, model)[0]
    prefix, patches = rows[: model.prefix_tokens], rows[model.prefix_tokens :]
    without_position = read_mask(upload, model, threat)
    nobody = torch.zeros_like(without_position)
    return TokenGradients(prefix, patches, nobody, without_position, rows.new_empty(0, rows.shape[1]), Reading.ZEROS)


def solve_patches(uploads: Sequence[TokenGradients], right: Sequence[Tensor]) -> list[Tensor]:
    """Solve the closed form of several uploads that show equally many tokens.

    Args:
        uploads: The gradients at each upload's tokens.
        right: Each upload's gradient of the patch embedding, (dim, values) float64.

    Returns:
        For each upload the normalised patches (patches, values), in place.
    """
    solved = least_squares(torch.stack([tokens.unknowns for tokens in uploads]), torch.stack(list(right)))
    return [tokens.spread(values) for tokens, values in zip(uploads, solved, strict=True)]


def count_refusal(patches: int, dim: int) -> str | None:
    """Say that there are too many patches for the closed form; None if there are not.

    Args:
        patches: Patches of a picture.
        dim: Dimensions of a token.
    """
    if patches > dim:
        return f"{patches} patches are more unknowns than the {dim} equations per pixel: underdetermined"
    return None
