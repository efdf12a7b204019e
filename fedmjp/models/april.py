"""The architecture that the closed form of APRIL needs; not the one that anybody deploys."""

from timm.models.vision_transformer import Block
from torch import Tensor, nn


class AprilBlock(nn.Module):
    """A timm block without its first norm and without residual connections.

    APRIL's closed form (Lu et al., CVPR 2022, section 3.1, Theorem 1) needs the attention to read the embedded tokens
    themselves, and the gradient at them to be the position embedding's. A pre-norm block gives neither. The surgery is
    the one that breaching makes for its ``vit_*_april`` models. A model whose first block is this one carries
    ``_april`` in its name.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.norm2 = block.norm2
        self.mlp = block.mlp

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply attention and MLP without the first norm and residuals.

        Args:
            tokens: (batch, tokens, dim).

        Returns:
            The same shape.
        """
        mixed: Tensor = self.mlp(self.norm2(self.attn(tokens)))
        return mixed
