"""Which pictures our figures may be of: none that the prior was measured on, none that an attack was developed on.

``development.json`` names the 20 ImageNet pictures on which ``mjp_prior`` and ``mjp_span`` were developed. What is
reported of any attack leaves them out.
"""

from pathlib import Path

from fedmjp.attacks.natural_patches import measured_on
from fedmjp.attacks.picture_lists import holds

DEVELOPMENT = Path(__file__).with_name("development.json")


def developed_on(picture: str, sha256: str = "") -> bool:
    """Say whether an attack was developed on a picture.

    Args:
        picture: Its file's name, in whatever folder and with whatever ending.
        sha256: Of its float32 pixels as the model sees them; it tells a renamed picture.
    """
    return holds(DEVELOPMENT, picture, sha256)


def seen_before(picture: str) -> bool:
    """Say whether the prior was measured on a picture, or an attack developed on it.

    Args:
        picture: Its file's name.
    """
    return measured_on(picture) or developed_on(picture)
