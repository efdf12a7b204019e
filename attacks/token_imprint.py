"""Patches out of the gradients of MLPs, for weights that print them there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, on_device
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

SERVER = "token_imprint"
EMPTY = 1e-5  # of the largest bias gradient: a bin with less holds no token
SAME = 3e-3  # largest difference between the readings of one token that two bins share
LONE = 2e-3  # how far mean and length of a token alone may be from what a LayerNorm makes
PLACE = 0.1  # how far a mark may be from that of a place, in steps between places
ALIKE = 1.5e-4  # relative gap between the weights in the loss of two pictures; of one they differ by a third of it
FEW = 3  # patches that make no picture yet


@dataclass(frozen=True)
class Printed:
    """Tokens that were alone in a bin.

    Attributes:
        patches: (tokens, 3 * patch_size ** 2) float64, normalised, as far as the patch embedding keeps them.
        places: (tokens,) int64, of the patch.
        weights: (tokens,) float64, the same for the tokens of a picture.
        occupied: Bins that held anything.
    """

    patches: Tensor
    places: Tensor
    weights: Tensor
    occupied: int


class TokenImprint(Attack[VitClassifier]):
    """A reader of the tokens that the server of the same name prints (``fedmjp.server.modifications.token_imprint``).

    The gradients of neighbouring rows of the MLPs differ by the tokens between their thresholds: in the weights by
    sum_t s_t h_t, in the biases by sum_t s_t, with h_t the token after LayerNorm and s_t its weight. Their ratio is a
    token if it was alone. It has then mean zero and length one per dimension, as every LayerNorm's output; a mixture is
    shorter, unless its parts are alike. The anchors give back scale and shift, the mark gives the place. Tokens
    of a picture have one weight in the loss, after the scale is divided out: by it they are dealt to pictures.

    Only tokens that pass all of this are given; the rest of a picture is its mean patch. Pictures whose weights fall
    together would be mixed: where a place is taken twice, nothing of the two is given.
    """

    name = "token_imprint"
    paper = "Fowl et al., Robbing the Fed, ICLR 2022, for the tokens of an unmodified vision transformer"
    summary = "reads the patches that a server of the same name prints into the MLPs' gradients"
    requires = "a server token_imprint; gradients of the MLPs' first layers"
    exploits = "a row of an MLP whose threshold lies between two tokens tells them apart"
    takes_sums = True
    stack = 1
    handled = frozenset({"scaled", "summed"})  # the scale cancels in the ratio; all pictures of a sum are read

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name the gradients of the first layer of all MLPs but the last."""
        blocks = range(len(model.backbone.blocks) - 1)
        return [f"backbone.blocks.{block}.mlp.fc1.{part}" for block in blocks for part in ("weight", "bias")]

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse all weights but those of the server that prints tokens."""
        del model
        if threat.server is None or threat.server.name != SERVER:
            sent = "honest weights" if threat.server is None else f"those of {threat.server.name}"
            return f"reads what weights of server {SERVER} print, not {sent}"
        return None

    def caveat(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Say which share of the tokens is alone in a bin."""
        tokens, bins = threat.pictures * model.grid**2, sum(len(biases) for biases in _biases(model))
        alone = float(torch.exp(torch.tensor(-tokens / bins)))
        return f"{self.name}: {tokens} patches in {bins} bins: about {100 * alone:.0f} % are alone, others stay grey"

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        del threat, generator  # nothing is drawn
        printed = read_tokens(upload, model)
        members = by_picture(printed, upload.num_examples)
        grey = torch.full((model.grid**2, printed.patches.shape[1]), 0.0, dtype=torch.float64)
        pictures = []
        for index in members:
            patches = grey.clone()
            patches += printed.patches[index].mean(dim=0)
            patches[printed.places[index]] = printed.patches[index]
            pictures.append(patches)
        pictures += [grey] * (upload.num_examples - len(pictures))
        images = from_patches(torch.stack(pictures), model.image_size, model.patch_size)
        placed = sum(len(index) for index in members)
        diagnostics = {
            "occupied_bins": float(printed.occupied),
            "lone_tokens": float(len(printed.places)),
            "placed_share": placed / (upload.num_examples * model.grid**2),
        }
        return Reconstruction(model.denormalise(images.to(model.mean.device)).float().cpu(), diagnostics)


def _biases(model: VitClassifier) -> list[Tensor]:
    return [block.mlp.fc1.bias for block in model.backbone.blocks[:-1]]


def read_tokens(upload: Upload, model: VitClassifier) -> Printed:
    """Read every token that was alone in a bin, in the order of the measurement.

    Args:
        upload: With the gradients of the MLPs' first layers.
        model: With the weights that the server had changed.
    """
    blocks = range(len(model.backbone.blocks) - 1)
    weight, bias = (
        torch.cat([on_device(upload, f"backbone.blocks.{block}.mlp.fc1.{part}", model) for block in blocks]).cpu()
        for part in ("weight", "bias")
    )
    # Rows above a threshold hold all tokens above it: those between two thresholds are the difference.
    sums = torch.cat([weight[:-1] - weight[1:], weight[-1:]])
    shares = torch.cat([bias[:-1] - bias[1:], bias[-1:]])
    occupied = (shares.abs() > EMPTY * bias.abs().max()).nonzero().flatten()
    readings, strength = _merged(occupied, sums[occupied] / shares[occupied, None], shares[occupied])
    positions = model.get_parameter(names.POSITION_EMBEDDING).detach()[0, model.prefix_tokens :].double().cpu()
    dim = positions.shape[1]
    plus, minus, place, written = range(dim - 4, dim)
    anchor = float(positions[0, plus])
    scale = 2 * anchor / (readings[:, plus] - readings[:, minus])
    shift = -(readings[:, plus] + readings[:, minus]) * scale / 2
    tokens = readings * scale[:, None] + shift[:, None]
    marks = positions[:, place]
    steps = (tokens[:, place] - marks[0]) / (marks[1] - marks[0])
    places = steps.round().long()
    lone = (readings.mean(dim=1).abs() < LONE) & ((readings.square().mean(dim=1) - 1).abs() < LONE)
    lone &= ((steps - places).abs() < PLACE) & (places >= 0) & (places < len(marks))
    passed = 1 - 1 / dim - readings[:, written].square() / dim  # of a token's LayerNorm, at the dimension written
    embedding = model.get_parameter(names.PATCH_WEIGHT).detach().flatten(1).double().cpu()
    patches = tokens[lone] @ torch.linalg.pinv(embedding).T
    return Printed(patches, places[lone], (strength * scale / passed)[lone], len(occupied))


def _merged(bins: Tensor, readings: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the readings and shares of neighbouring bins that share one token, on the threshold between them."""
    first = torch.ones(len(bins), dtype=torch.bool)
    first[1:] = (bins[1:] != bins[:-1] + 1) | ((readings[1:] - readings[:-1]).abs().amax(dim=1) > SAME)
    group = first.cumsum(0) - 1
    count = int(first.sum())
    strength = torch.zeros(count, dtype=shares.dtype).index_add(0, group, shares)
    weighed = torch.zeros(count, readings.shape[1], dtype=readings.dtype)
    weighed = weighed.index_add(0, group, readings * shares[:, None])
    return weighed / strength[:, None], strength


def by_picture(printed: Printed, pictures: int) -> list[Tensor]:
    """Group tokens by picture, the fullest first; leave out groups in which two pictures would be mixed.

    Args:
        printed: The tokens.
        pictures: The largest number of groups.

    Returns:
        For each picture the indices of its tokens.
    """
    order = printed.weights.argsort()
    values = printed.weights[order]
    gaps = values.diff() > ALIKE * values[1:].abs()
    members = [index for index in torch.tensor_split(order, gaps.nonzero().flatten() + 1) if len(index) >= FEW]
    whole = [index for index in members if len(set(printed.places[index].tolist())) == len(index)]
    return sorted(whole, key=len, reverse=True)[:pictures]
