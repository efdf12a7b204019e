"""Which reconstructions a row shows: the most revealing picture, the median one, the least revealing one."""

from collections.abc import Mapping
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
    def files(self) -> tuple[Path, Path, Path]:
        """Original, shuffled, reconstruction."""
        return self.original, self.shuffled, self.reconstruction


@dataclass(frozen=True)
class Gallery:
    """Up to three pictures for each entry, by the entry's ``id``."""

    entries: Mapping[str, tuple[Shown, ...]]

    def of(self, entry_id: str) -> tuple[Shown, ...]:
        """The pictures of one entry; none if it has none."""
        return self.entries.get(entry_id, ())
