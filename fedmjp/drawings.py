"""Save figures as small files that are no less readable."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from fedmjp.files import replacing

COLOURS = 256  # of a palette
KMEANS = 5  # rounds in which the palette settles: without, pale bands turn grey
QUALITY = 85  # of JPEG, with colours at full resolution


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
    options = {"quality": QUALITY, "subsampling": 0, "optimize": True, "progressive": True}
    with replacing(path) as partial:
        figure.savefig(partial, format="jpeg", dpi=dots_per_inch, pil_kwargs=options)
