"""From pictures to the private batch of one round."""

from collections.abc import Sequence

import torch

from fedmjp import jigsaw
from fedmjp.data.pictures import LabelledPicture
from fedmjp.private import PrivateBatch
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture


def private_batch(
    pictures: Sequence[LabelledPicture],
    *,
    grid: int,
    mask_ratio: float,
    gradient_of: Picture,
    seed: int,
    number: int = 0,
    one_mask: bool = False,
) -> PrivateBatch:
    """Draw each picture's jigsaw and put both versions side by side.

    A puzzle depends on (seed, ratio, picture, number) alone, so that every model and attack meets the same. The number
    says which upload of these pictures it is for, from 0. With ``one_mask`` all have the first one's puzzle, as in the
    official code.
    """
    again = (number,) if number else ()  # the first does not depend on whether there are more
    puzzles = [
        jigsaw.draw(grid, mask_ratio, generator=torch_generator(seed, "jigsaw", mask_ratio, picture.name, *again))
        for picture in (pictures[:1] if one_mask else pictures)
    ]
    puzzles *= len(pictures) // len(puzzles)
    clean = torch.stack([picture.image for picture in pictures])
    source = torch.cat([puzzle.source for puzzle in puzzles])
    return PrivateBatch(
        clean=clean,
        shuffled=jigsaw.rearrange(clean, source),
        mask=torch.cat([puzzle.mask for puzzle in puzzles]),
        source=source,
        labels=torch.tensor([picture.label for picture in pictures]),
        pictures=tuple(picture.name for picture in pictures),
        gradient_of=gradient_of,
    )
