"""From a picture to the private batch of one round."""

import torch

from fedmjp import jigsaw
from fedmjp.config import FederationConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import Selection
from fedmjp.private import PrivateBatch
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture


def private_batch(
    picture: LabelledPicture, *, grid: int, mask_ratio: float, gradient_of: Picture, seed: int
) -> PrivateBatch:
    """Draw the picture's jigsaw and put both versions side by side.

    The puzzle depends on (seed, ratio, picture) alone, so that every model and attack meets the same.

    Args:
        picture: The private picture.
        grid: Patches per side.
        mask_ratio: Wanted share of masked patches, in [0, 1].
        gradient_of: The version whose gradient will be uploaded.
        seed: The run's seed.
    """
    puzzle = jigsaw.draw(grid, mask_ratio, generator=torch_generator(seed, "jigsaw", mask_ratio, picture.name))
    clean = picture.image[None]
    return PrivateBatch(
        clean=clean,
        shuffled=jigsaw.rearrange(clean, puzzle.source),
        mask=puzzle.mask,
        source=puzzle.source,
        labels=torch.tensor([picture.label]),
        pictures=(picture.name,),
        gradient_of=gradient_of,
    )


def batch_of_round(config: FederationConfig, selection: Selection, client: int, server_round: int) -> PrivateBatch:
    """What one client computes its upload from in one round (from 1) of a federated run."""
    index, gradient_of = config.turn(server_round)
    return private_batch(
        selection.partition(client, config.clients)[index],
        grid=config.image_size // config.patch_size,
        mask_ratio=config.mask_ratio,
        gradient_of=gradient_of,
        seed=config.seed,
    )
