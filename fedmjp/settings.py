"""The three evaluation settings of MJP (Ren et al., CVPR 2023, section 5.4, Table 5), and kinds of attacks.

x is a private picture, x~ its shuffled version: a attacks the gradient of x and compares with x, b x~ with x~, c x~
with x.
"""

from enum import StrEnum
from typing import Literal, Self

Role = Literal["attack", "floor", "bound"]
Reveals = Literal["pictures", "features", "labels"]
Protocol = Literal["float", "8bit"]  # how pictures are represented when they are scored


class Picture(StrEnum):
    """One of the two versions of a private picture."""

    CLEAN = "clean"
    SHUFFLED = "shuffled"


class Setting(StrEnum):
    """Evaluation setting: the version behind the gradient, and the one that the reconstruction is compared with."""

    gradient_of: Picture
    compared_with: Picture

    A = "a", Picture.CLEAN, Picture.CLEAN
    B = "b", Picture.SHUFFLED, Picture.SHUFFLED
    C = "c", Picture.SHUFFLED, Picture.CLEAN

    def __new__(cls, letter: str, gradient_of: Picture, compared_with: Picture) -> Self:
        """Make a setting from its letter and the two versions."""
        setting = str.__new__(cls, letter)
        setting._value_ = letter
        setting.gradient_of, setting.compared_with = gradient_of, compared_with
        return setting
