"""The base of closed forms: one linear system per upload, solved together where systems have the same size."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, Model, picture
from fedmjp.attacks.token_gradients import (
    ReadingOptions,
    TokenGradients,
    oracle_token_gradients,
    positions_refusal,
    token_gradients,
)
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.models import names
from fedmjp.models.entrance import Entrance
from fedmjp.patches import from_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

Solution = tuple[Tensor, dict[str, float]]  # normalised patches (patches, values), and diagnostics


@dataclass(frozen=True)
class System:
    """One upload's equations ``rows^T X = right``.

    Attributes:
        tokens: The gradients at the tokens, as the upload shows them.
        rows: (unknown tokens, dim).
        right: (dim, values).
        diagnostics: Figures that are known before it is solved.
    """

    tokens: TokenGradients
    rows: Tensor
    right: Tensor
    diagnostics: Mapping[str, float]


class ClosedForm(Attack[Model]):
    """An attack that solves a linear system in the gradients at the tokens.

    ``right_side`` names the parameter whose gradient makes the right-hand side; ``handled`` are the marks that it takes
    into account.
    """

    options_type: ClassVar[type[Config]] = ReadingOptions
    any_steps = True  # the equation is linear in the gradients, which steps add up
    right_side: ClassVar[str]
    handled: ClassVar[frozenset[Mark]] = frozenset({"scaled"})  # a factor is on both sides of the equation

    def tensors(self, model: Model) -> Sequence[str]:
        """Name the gradients of position and unknown embedding, and of the right-hand side."""
        unknown = [names.UNKNOWN_EMBEDDING] if model.defended else []
        return [names.POSITION_EMBEDDING, *unknown, self.right_side]

    def requirement(self, model: Model, threat: ThreatModel) -> str | None:
        """Refuse models whose uploads do not show the gradients at the tokens."""
        del threat
        return positions_refusal(model)

    @override
    def reconstruct_stack(
        self, uploads: Sequence[Upload], model: Model, threat: ThreatModel, *, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        del generators  # nothing is drawn
        systems = [self._system(upload, model, threat) for upload in uploads]
        groups: defaultdict[int, list[int]] = defaultdict(list)  # masks of different size make different systems
        for index, system in enumerate(systems):
            groups[len(system.rows)].append(index)
        reconstructions: dict[int, Reconstruction] = {}
        for group in groups.values():
            formats = (torch.finfo(uploads[index].tensors[self.right_side].dtype) for index in group)
            rounding = max(threat.rounding, *(info.eps / 2 for info in formats))
            solved = self._solve([systems[index] for index in group], model, rounding)
            for index, (patches, diagnostics) in zip(group, solved, strict=True):
                count, system = uploads[index].num_examples, systems[index]
                images = picture(patches, model).expand(count, -1, -1, -1).contiguous()
                hides = system.tokens.mask.any() and not model.defended
                visible = _visible_pixels(system.tokens, model, count) if hides else None
                reconstructions[index] = Reconstruction(images, {**system.diagnostics, **diagnostics}, visible)
        return [reconstructions[index] for index in range(len(uploads))]

    def _seen(self, upload: Upload, model: Model, threat: ThreatModel) -> TokenGradients:
        return token_gradients(upload, model, threat, self.options.reading)

    @abstractmethod
    def _system(self, upload: Upload, model: Model, threat: ThreatModel) -> System:
        """Set up the equations of one upload."""

    @abstractmethod
    def _solve(self, systems: Sequence[System], model: Model, rounding: float) -> list[Solution]:
        """Solve systems of one size, whose right-hand sides were rounded with this relative error."""


class Oracle(ClosedForm[Model]):
    """The base of bounds: a closed form that is given every token's gradient, masked or not, which no server sees."""

    exploits = "more than any server sees"
    role = "bound"
    options_type = Config

    def tensors(self, model: Model) -> Sequence[str]:
        """Name the gradients at all tokens, of the position embedding (for the mask), and of the right-hand side."""
        del model
        return [names.ORACLE_TOKEN_GRADIENTS, names.POSITION_EMBEDDING, self.right_side]

    def requirement(self, model: Model, threat: ThreatModel) -> str | None:
        """Refuse all but the gradient of a single picture, besides what the attack itself refuses."""
        if threat.update != "gradient" or threat.batch_size != 1:
            return "needs the gradient of a single picture: of more, the gradients at the tokens are a sum too"
        return super().requirement(model, threat)

    def _seen(self, upload: Upload, model: Model, threat: ThreatModel) -> TokenGradients:
        return oracle_token_gradients(upload, model, threat)


def _visible_pixels(tokens: TokenGradients, model: Entrance, count: int) -> Tensor:
    """Mark the pixels of patches that the upload has a gradient of."""
    of_patches = (~tokens.mask).float()[None, :, None].expand(-1, -1, model.patch_size**2)
    return from_patches(of_patches, model.pixels, model.patch_size)[:, 0].bool().expand(count, -1, -1).contiguous()


def stacked(systems: Sequence[System]) -> tuple[Tensor, Tensor]:
    """Stack equations of one size.

    Args:
        systems: With equally many unknown tokens.

    Returns:
        Rows (stack, unknown tokens, dim) and right-hand sides (stack, dim, values).
    """
    return torch.stack([system.rows for system in systems]), torch.stack([system.right for system in systems])
