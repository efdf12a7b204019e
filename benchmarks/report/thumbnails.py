"""Pictures as the page carries them: small, and each once however many rows show it."""

import io
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

SIDES = (144, 112, 80, 56, 40)  # pixels, tried in this order
BUDGET = 500_000  # bytes of all thumbnails
QUALITY = 80


@dataclass(frozen=True)
class Thumbnail:
    """A picture that is embedded once, as WebP in base64."""

    id: str
    width: int
    height: int
    content: str


def make_thumbnails(paths: Iterable[Path], name: str, sides: Sequence[int] = SIDES) -> dict[Path, Thumbnail]:
    """Map each file to the largest thumbnail that fits the budget; files of the same content are one picture.

    Args:
        paths: Image files.
        name: Beginning of the pictures' ids.
        sides: Longest sides in pixels to try; the last is taken where none fits. Nothing is enlarged.
    """
    by_content: dict[bytes, Image.Image] = {}
    contents = {path: path.read_bytes() for path in dict.fromkeys(paths)}
    for content in contents.values():
        if content not in by_content:
            with Image.open(io.BytesIO(content)) as image:
                by_content[content] = _within(image.convert("RGB"), sides[0])
    for side in sides:
        encoded = {content: _webp(_within(image, side)) for content, image in by_content.items()}
        if sum(map(len, encoded.values())) <= BUDGET:
            break
    pictures = {
        content: Thumbnail(f"{name}-{place}", *by_content[content].size, b64encode(webp).decode())
        for place, (content, webp) in enumerate(encoded.items())
    }
    return {path: pictures[content] for path, content in contents.items()}


def _within(image: Image.Image, side: int) -> Image.Image:
    longest = max(image.size)
    if longest <= side:
        return image
    width, height = (max(1, round(pixels * side / longest)) for pixels in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _webp(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "webp", quality=QUALITY)
    return content.getvalue()
