"""Which reconstructions a row shows: the most revealing picture, the median one, the least revealing one."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shown:
    """One picture of an entry: its name, what leaked of it (PSNR in dB), and three PNG files."""

    label: str
    picture: str
    psnr: float
    original: Path
    shuffled: Path
    reconstruction: Path

    @property
    def files(self) -> dict[str, Path]:
        """By what they show."""
        return {"original": self.original, "shuffled": self.shuffled, "reconstruction": self.reconstruction}


Gallery = dict[str, tuple[Shown, ...]]  # up to three pictures for each entry, by the entry's id
