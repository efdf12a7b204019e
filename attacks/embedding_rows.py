"""The tokens of a client's texts, from the rows of an embedding that its update moved.

A row of an embedding gets a gradient only where its token stands in a text; all other gradients are exactly zero. So
SGD and Adam leave these rows where they were, however many steps they take, and decoupled weight decay shrinks them all
by one factor. A row that moved otherwise, by more than rounding, is a token of the texts; in which text and place it
stands is not told. An output layer that shares the weight (tied embeddings) moves every row, and so do noise and decay
in the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.layers import LayeredNetwork

NAME = "embedding_rows"


@dataclass(frozen=True)
class Tokens:
    """Different tokens of the texts behind one upload, in no order."""

    layer: str  # name of the embedding
    rows: Tensor  # (tokens,) int64
    vocabulary: int  # rows of the embedding
    padding: int | None  # row that fills texts up and never gets a gradient


def read_tokens(network: LayeredNetwork, change: Mapping[str, Tensor], steps: int = 1) -> Tokens:
    """Read the tokens of all texts behind a gradient, or a change of weights by any steps of SGD or Adam.

    Args:
        network: With the weights that the server sent; the embedding with most rows is taken for that of tokens.
        change: By the network's names, as it was sent.
        steps: Of the client, each of which rounds.

    Raises:
        AttackNotApplicableError: If no embedding is sent, it is frozen or tied, or every row moved.
    """
    embeddings = {
        name: module
        for name, module in network.module.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and f"{name}.weight" in change
    }
    if not embeddings:
        raise AttackNotApplicableError(f"{NAME}: needs an embedding of tokens whose weight is sent")
    name = max(embeddings, key=lambda key: embeddings[key].num_embeddings)
    weight = embeddings[name].weight
    sharing = [
        key
        for key, value in network.module.named_parameters(remove_duplicate=False)
        if value is weight and key != f"{name}.weight"
    ]
    if sharing:
        raise AttackNotApplicableError(f"{NAME}: {name} is tied to {', '.join(sharing)}, which moves every row")
    moved = _moved_rows(weight.detach().double(), change[f"{name}.weight"].double(), steps, weight.dtype)
    if not len(moved):
        raise AttackNotApplicableError(f"{NAME}: no row of {name} moved, as where it is frozen")
    if len(moved) == len(weight):
        raise AttackNotApplicableError(f"{NAME}: every row of {name} moved, as under noise or with decay in the loss")
    return Tokens(name, moved, len(weight), embeddings[name].padding_idx)


def _moved_rows(weight: Tensor, change: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """List the rows that moved otherwise than by one factor of themselves, which the median row tells."""
    shares = -(change * weight).sum(1) / weight.square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    rounding = (steps + 1) * torch.finfo(dtype).eps * weight.abs()
    candidates = [0.0, float(shares[weight.any(1)].median()) if bool(weight.any()) else 0.0]
    still = [((change + share * weight).abs() <= rounding).all(1) for share in candidates]
    return (~max(still, key=lambda rows: int(rows.sum()))).nonzero().flatten()
