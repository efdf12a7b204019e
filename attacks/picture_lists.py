"""Lists of pictures that ship with attacks, and how one is told to be among them."""

import json
from functools import lru_cache
from pathlib import Path

DIGITS = 16  # of a SHA-256, enough to tell pictures apart


def holds(pictures: Path, picture: str, sha256: str = "") -> bool:
    """Say whether a list names a picture.

    Args:
        pictures: A list that ships with fedmjp, JSON.
        picture: A file's name, in whatever folder and with whatever ending.
        sha256: Of its float32 pixels as the model sees them; it tells a renamed picture at the image sizes of the list.
    """
    names, digests = _read(pictures)
    return Path(picture).stem in names or sha256[:DIGITS] in digests


@lru_cache(maxsize=2)
def _read(pictures: Path) -> tuple[frozenset[str], frozenset[str]]:
    about = json.loads(pictures.read_text(encoding="utf-8"))
    names = frozenset(Path(name).stem for name in about["pictures"])
    return names, frozenset(digest for of_size in about["sha256"].values() for digest in of_size)
