"""What kinds of attacks there are."""

from typing import Literal

Role = Literal["attack", "floor", "bound"]
Reveals = Literal["pictures", "features", "labels"]
