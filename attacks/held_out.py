"""Pictures that figures must leave out: the prior was measured on them, or an attack was developed on them.

``natural_patches.json`` names the 300 ImageNet pictures of the prior, ``development.json`` the 20 on which
``mjp_prior`` and ``mjp_span`` were developed.
"""

import json
from functools import lru_cache
from pathlib import Path

MEASURED, DEVELOPED = (Path(__file__).with_name(f"{name}.json") for name in ("natural_patches", "development"))
DIGITS = 16  # of a SHA-256, enough to tell pictures apart


def measured_on(picture: str, sha256: str = "") -> bool:
    """Say whether the prior of natural patches was measured on a picture.

    Args:
        picture: Its file's name, in whatever folder and with whatever ending.
        sha256: The digest of its float32 pixels as the model sees them; it tells a renamed picture.
    """
    return not _read(MEASURED).isdisjoint({Path(picture).stem, sha256[:DIGITS]})


def developed_on(picture: str, sha256: str = "") -> bool:
    """Say whether an attack was developed on a picture.

    Args:
        picture: Its file's name, in whatever folder and with whatever ending.
        sha256: The digest of its float32 pixels as the model sees them; it tells a renamed picture.
    """
    return not _read(DEVELOPED).isdisjoint({Path(picture).stem, sha256[:DIGITS]})


def seen_before(picture: str) -> bool:
    """Say whether the prior was measured on a picture, or an attack developed on it.

    Args:
        picture: Its file's name.
    """
    return measured_on(picture) or developed_on(picture)


@lru_cache(maxsize=2)
def _read(pictures: Path) -> frozenset[str]:
    """Read the names of the pictures and the digests of their pixels in each size."""
    about = json.loads(pictures.read_text(encoding="utf-8"))
    return frozenset(Path(name).stem for name in about["pictures"]).union(*about["sha256"].values())
