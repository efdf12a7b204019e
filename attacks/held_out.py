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
    return _names(MEASURED, picture, sha256)


def developed_on(picture: str, sha256: str = "") -> bool:
    """Say whether an attack was developed on a picture.

    Args:
        picture: Its file's name, in whatever folder and with whatever ending.
        sha256: The digest of its float32 pixels as the model sees them; it tells a renamed picture.
    """
    return _names(DEVELOPED, picture, sha256)


def seen_before(picture: str) -> bool:
    """Say whether the prior was measured on a picture, or an attack developed on it.

    Args:
        picture: Its file's name.
    """
    return measured_on(picture) or developed_on(picture)


def _names(pictures: Path, picture: str, sha256: str) -> bool:
    names, digests = _read(pictures)
    return Path(picture).stem in names or sha256[:DIGITS] in digests


@lru_cache(maxsize=2)
def _read(pictures: Path) -> tuple[frozenset[str], frozenset[str]]:
    about = json.loads(pictures.read_text(encoding="utf-8"))
    names = frozenset(Path(name).stem for name in about["pictures"])
    return names, frozenset(digest for of_size in about["sha256"].values() for digest in of_size)
