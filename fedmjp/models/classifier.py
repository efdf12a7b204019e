"""timm models that take images in [0, 1], optionally with what MJP adds to them."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from fedmjp.errors import BadInputError
from fedmjp.models.entrance import denormalised
from fedmjp.models.localisation import LocalisationRegressor, localisation_loss

if TYPE_CHECKING:
    from timm.models.swin_transformer import SwinTransformer


class _PreLogits(nn.Module):
    """A timm model up to what its last layer reads."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, normalised: Tensor) -> Tensor:
        backbone: Any = self.backbone
        features: Tensor = backbone.forward_head(backbone.forward_features(normalised), pre_logits=True)
        return features


class Classifier(nn.Module):
    """Images in [0, 1] to class logits; the only place where mean and standard deviation are applied."""

    mean: Tensor
    std: Tensor
    image_size: int
    patch_size: int

    def __init__(self, backbone: nn.Module, *, image_size: int, patch_size: int) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.unknown_embedding: nn.Parameter | None = None
        self.localisation: LocalisationRegressor | None = None
        self.image_size, self.patch_size = image_size, patch_size
        self.pixels = (image_size, image_size)  # height and width of its pictures, which are squares
        self.grid = image_size // patch_size  # patches per side, as a jigsaw moves them
        self.defended = False  # whether the model has MJP's unknown position embedding
        self.has_positions = False  # whether it has an absolute position embedding: updates then hold its gradient
        pretrained: Any = backbone.pretrained_cfg
        for name in ("mean", "std"):
            values = torch.tensor(pretrained[name], dtype=torch.float32)
            self.register_buffer(name, values.view(3, 1, 1), persistent=False)

    def no_weight_decay(self) -> set[str]:
        """Name the parameters that timm's recipes do not decay, besides biases and vectors."""
        listed = self.backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()
        return {f"backbone.{name}" for name in listed}

    def denormalise(self, images: Tensor) -> Tensor:
        """Map images from the network's input space back to [0, 1]; values outside are clipped.

        Args:
            images: (batch, 3, size, size), normalised.
        """
        return denormalised(images, self.mean, self.std)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the logits (batch, classes).

        Args:
            images: (batch, 3, size, size) in [0, 1].
            mask: (batch or 1, patches) bool, True where MJP masks the position; None masks nothing.
        """
        normalised = (images - self.mean) / self.std
        replaced = self._replaced(mask)
        logits: Tensor = (
            functional_call(self.backbone, replaced, (normalised,)) if replaced else self.backbone(normalised)
        )
        return logits

    def features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the input of the last layer: a transformer's class token, the pooled map of other networks.

        Args:
            images: (batch, 3, size, size) in [0, 1].
            mask: (batch or 1, patches) bool, True where MJP masks the position; None masks nothing.

        Returns:
            (batch, dim).
        """
        replaced = {f"backbone.{name}": value for name, value in self._replaced(mask).items()}
        features: Tensor = functional_call(_PreLogits(self.backbone), replaced, ((images - self.mean) / self.std,))
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Apply the last layer alone: ``logits(features(x))`` is ``forward(x)``.

        Args:
            features: (batch, dim).
        """
        logits: Tensor = self.backbone.get_classifier()(features)
        return logits

    def localisation_loss(self, mask: Tensor | None = None) -> Tensor:
        """Compute the DAL loss of the position embedding (MJP, Eq. 2), a scalar.

        Args:
            mask: (batch or 1, patches) bool, True where MJP masks the position; None masks nothing.

        Raises:
            BadInputError: If the model has no regressor.
        """
        if self.localisation is None:
            raise BadInputError(
                "the model has no localisation regressor: build it with localisation linear or nonlinear"
            )
        return localisation_loss(self.localisation, self._patch_positions(), mask)

    def _replaced(self, mask: Tensor | None) -> dict[str, Tensor]:
        """Return the parameters of the backbone that are replaced for one call."""
        if mask is not None:
            raise BadInputError("a mask was given to a model without an unknown position embedding")
        return {}

    def _patch_positions(self) -> Tensor:
        """Return the position embedding without class tokens, (patches, dim)."""
        raise BadInputError("the model has no position embedding to localise patches from")


class PositionedClassifier(Classifier):
    """A timm transformer with a learned absolute position embedding E_pos, optionally with what MJP adds.

    With ``defended``, a mask may be passed to ``forward``: masked patches then share one learned
    "unknown" position embedding E_unk instead of their own row of E_pos (MJP, section 4.1, Eq. 4 and 5).
    The timm forward is used as it is: for the call, its position embedding is replaced by one that
    depends on the mask, and gradients flow back to both E_pos and E_unk.

    Paper and official code (yhlleo/MJP) differ. Options, the paper's word first and the default:

    =======================  =============================  ================================  ===================
    what                     paper                          code                              option
    =======================  =============================  ================================  ===================
    mask ratio               0.03 (best row of Table 3)     0.1 (train.sh)                    of the defence
    puzzle applied           always                         to half of the batches            Puzzle.probability
    in the warm-up           not mentioned                  no puzzle                         Puzzle.warmup_epochs
    masks                    per picture (Alg. 1)           one per batch                     Puzzle.masks
    DAL, nonlinear           three layers (section 5.3)     two                               localisation_layers
    DAL weight               0.01                           cosine from 0.01 to 0.005, after  localisation_schedule
                                                            a linear warm-up
    =======================  =============================  ================================  ===================

    No option: the code keeps E_pos and E_unk as the rows of one ``nn.Embedding`` drawn from N(0, 1) and
    decays it, although its baseline's E_pos starts at a standard deviation of 0.02 and is not decayed; the
    paper is silent. Here E_unk starts like E_pos, and neither is decayed, so that the defence is the only
    difference between the arms.

    Args:
        backbone: The timm transformer, whose patch embedding says the sizes.
        defended: Whether to add E_unk, which takes position embeddings that it stands in for.
        index_embedding: Whether to add a second embedding of positions that is never masked (IDX, Table 4).
            It starts at zero, as in the official code.
    """

    positions_name: ClassVar[str]  # of E_pos in the backbone, (1, tokens, dim)

    def __init__(self, backbone: nn.Module, *, defended: bool, index_embedding: bool = False) -> None:
        embed: Any = backbone.patch_embed
        super().__init__(backbone, image_size=int(embed.img_size[0]), patch_size=int(embed.patch_size[0]))
        positions = attrgetter(self.positions_name)(backbone)
        self.defended, self.has_positions = defended, positions is not None
        # The tokens before the patches (the class token) that have a row in the position embedding.
        self.prefix_tokens = int(getattr(backbone, "num_prefix_tokens", 0))
        # Always drawn, so that what is drawn after it does not depend on the defence.
        unknown = nn.init.trunc_normal_(torch.empty(self.backbone.embed_dim), std=0.02)
        self.unknown_embedding = nn.Parameter(unknown) if defended else None
        self.index_embedding = nn.Parameter(torch.zeros_like(positions)) if index_embedding else None

    @property
    def _positions(self) -> Any:
        """Return E_pos, or None. Under functional_call weights are plain tensors, which get_parameter refuses."""
        return attrgetter(self.positions_name)(self.backbone)

    def masked_position_embedding(self, mask: Tensor) -> Tensor:
        """Put E_unk at masked patches and E_pos elsewhere.

        Args:
            mask: (batch, patches) bool.

        Returns:
            (batch, tokens, dim).
        """
        if self.unknown_embedding is None:
            raise BadInputError("a mask was given to a model without an unknown position embedding")
        prefix = mask.new_zeros(mask.shape[0], self.prefix_tokens)
        masked_tokens = torch.cat([prefix, mask], dim=1)[:, :, None]
        return torch.where(masked_tokens, self.unknown_embedding, self._positions)

    def _replaced(self, mask: Tensor | None) -> dict[str, Tensor]:
        if mask is None and self.index_embedding is None:
            return {}
        positions: Tensor = self._positions if mask is None else self.masked_position_embedding(mask)
        return {self.positions_name: positions if self.index_embedding is None else positions + self.index_embedding}

    def _patch_positions(self) -> Tensor:
        if not self.has_positions:
            return super()._patch_positions()
        positions: Tensor = self._positions[0, self.prefix_tokens :]
        return positions


class VitClassifier(PositionedClassifier):
    """A timm vision transformer with absolute position embeddings, or with none; optionally with what MJP adds."""

    positions_name = "pos_embed"


class SwinClassifier(PositionedClassifier):
    """A timm Swin transformer with an absolute position embedding E_pos, and MJP's E_unk in its place at masks.

    timm's Swin has relative positions alone. "We add MJP to the absolute PEs of Swin-T" (MJP, section 5.2), for
    which the official code has the option ``ape``: a learned embedding per patch, added after the patch
    embedding and its norm. Here it is a parameter of timm's patch embedding, ``patch_embed.pos_embed``, which a
    hook adds to the output; timm's forward is used as it is. Its start is the official one, a truncated normal
    distribution of standard deviation 0.02.

    The official configuration of the plain Swin-T has no absolute embedding, so the undefended arm is timm's own.

    With DAL the official code reads, for Swin, the position of a patch from the row of the next one, since it
    counts a class token that Swin does not have. Here a patch's own row is read.
    """

    positions_name = "patch_embed.pos_embed"

    def __init__(self, backbone: "SwinTransformer", *, index_embedding: bool = False) -> None:
        embed: Any = backbone.patch_embed
        positions = embed.proj.weight.new_empty(1, embed.num_patches, backbone.embed_dim)
        embed.pos_embed = nn.Parameter(nn.init.trunc_normal_(positions, std=0.02))
        embed.register_forward_hook(_add_positions)
        super().__init__(backbone, defended=True, index_embedding=index_embedding)

    @override
    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {f"backbone.{self.positions_name}"}


def _add_positions(embed: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
    """Add positions, (batch or 1, patches, dim), to an embedding of shape (batch, rows, columns, dim)."""
    positions: Any = embed.pos_embed
    moved: Tensor = embedded + positions.reshape(-1, *embedded.shape[1:])
    return moved
