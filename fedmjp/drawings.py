"""Save figures as small files that are no less readable."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from fedmjp.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 256  # of a palette
KMEANS = 5  # rounds in which the palette settles: without, pale bands turn grey
# Of photographs, with colours at full resolution.
JPEG: dict[str, Any] = {"quality": 85, "subsampling": 0, "optimize": True, "progressive": True}


def save_plot(figure: Figure, path: Path, *, dots_per_inch: int) -> None:
    """Write a figure of lines and areas as PNG with a palette, whole or not at all.

    Args:
        figure: Of matplotlib.
        path: Of the file.
        dots_per_inch: Resolution.
    """
    content = BytesIO()
    figure.savefig(content, format="png", dpi=dots_per_inch)
    drawn = Image.open(content).convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT, kmeans=KMEANS)
    with replacing(path) as partial:
        drawn.save(partial, format="PNG", optimize=True, dpi=(dots_per_inch, dots_per_inch))


def save_photographs(figure: Figure, path: Path, *, dots_per_inch: int) -> None:
    """Write a figure that shows photographs as JPEG, whole or not at all.

    Args:
        figure: Of matplotlib.
        path: Of the file.
        dots_per_inch: Resolution.
    """
    with replacing(path) as partial:
        figure.savefig(partial, format="jpeg", dpi=dots_per_inch, pil_kwargs=JPEG)
