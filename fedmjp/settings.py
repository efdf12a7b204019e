"""The three evaluation settings of MJP (Ren et al., CVPR 2023, section 5.4, Table 5), and kinds of attacks.

x is a private picture, x~ its shuffled version: a attacks the gradient of x and compares with x, b x~ with x~, c x~
with x.
"""

from enum import StrEnum
from typing import Literal

Role = Literal["attack", "floor", "bound"]
Reveals = Literal["pictures", "features", "labels"]


class Picture(StrEnum):
    """One of the two versions of a private picture."""

    CLEAN = "clean"
    SHUFFLED = "shuffled"


class Setting(StrEnum):
    """Evaluation setting: the version behind the gradient, and the one that the reconstruction is compared with."""

    A = "a"
    B = "b"
    C = "c"

    @property
    def gradient_of(self) -> Picture:
        """Return the version whose gradient the client uploads."""
        return Picture.CLEAN if self is Setting.A else Picture.SHUFFLED

    @property
    def compared_with(self) -> Picture:
        """Return the version that the evaluator compares the reconstruction with."""
        return Picture.SHUFFLED if self is Setting.B else Picture.CLEAN
