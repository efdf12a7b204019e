"""The pictures that features are looked up among, as the network sees them; for the evaluator alone."""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.errors import RecordError
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.inference import evaluated
from fedmjp.private import PrivateBatch
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture

CROP = 0.75  # of the side that another crop of a picture keeps
REMEMBERED = 20_000  # features, of the pictures that were seen last


@dataclass(frozen=True)
class Gallery:
    """The features of all pictures of an experiment, as the network that was sent computes them, without the pictures.

    Attributes:
        model: The network, which is not changed.
        weights: Digest of its weights.
        names: Of the pictures, each once.
        versions: (pictures, dim) float64, features of the pictures themselves, or as clients shuffle and mask them.
        crops: The same of another crop of each picture, always the same one.
    """

    model: VitClassifier = field(repr=False)
    weights: str
    names: tuple[str, ...]
    versions: Mapping[Picture, Tensor]
    crops: Tensor

    @classmethod
    def of(
        cls, model: VitClassifier, weights: str, batches: Iterable[PrivateBatch], versions: Collection[Picture]
    ) -> "Gallery":
        """Compute the gallery of pictures; of one that occurs twice, the first occurrence counts.

        Args:
            model: The network that was sent.
            weights: Digest of its weights.
            batches: All private pictures.
            versions: Which versions of them are looked up in.
        """
        features: dict[str, dict[str, Tensor]] = {}
        for batch in batches:
            for place, name in enumerate(batch.pictures):
                if name not in features:
                    picture = batch.part(place, place + 1)
                    masks = {Picture.CLEAN: None, Picture.SHUFFLED: picture.mask}
                    features[name] = {
                        str(version): _feature(model, weights, picture.version(version), masks[version])
                        for version in versions
                    } | {"crop": _feature(model, weights, another_crop(picture))}
        pictures = features.values()
        of_version = {version: torch.cat([entry[str(version)] for entry in pictures]) for version in versions}
        return cls(model, weights, tuple(features), of_version, torch.cat([entry["crop"] for entry in pictures]))

    def places(self, private: PrivateBatch) -> Tensor:
        """Return the places of a batch's pictures in the gallery, (batch,) int64.

        Args:
            private: The batch.

        Raises:
            RecordError: If the gallery lacks one of them.
        """
        places = {name: place for place, name in enumerate(self.names)}
        missing = [name for name in private.pictures if name not in places]
        if missing:
            raise RecordError(f"the gallery lacks {', '.join(missing)}")
        return torch.tensor([places[name] for name in private.pictures])

    def behind(self, private: PrivateBatch) -> Tensor:
        """Compute the features of what went into the network, (batch, dim) float64.

        Args:
            private: The batch behind an upload.
        """
        images = private.version(private.gradient_of)
        parts = zip(images[:, None], private.mask[:, None], strict=True)
        return torch.cat([_feature(self.model, self.weights, image, mask) for image, mask in parts])


def _feature(model: VitClassifier, weights: str, image: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the feature of one picture, (1, dim) float64: alone, so that it depends on no other picture."""
    used = mask if model.defended else None
    digest = hashlib.sha256(image.contiguous().numpy().tobytes())
    digest.update(b"" if used is None else used.contiguous().numpy().tobytes())
    device = model.mean.device
    key = (weights, str(device), digest.hexdigest())
    if key not in _features:
        with evaluated(model):
            features = model.features(image.to(device), None if used is None else used.to(device))
        _features[key] = features.double().cpu().clone()
        if len(_features) > REMEMBERED:
            _features.popitem(last=False)
    return _features[key]


# Galleries of one model share its features, whatever clients do to their updates.
_features: OrderedDict[tuple[str, str, str], Tensor] = OrderedDict()


def another_crop(private: PrivateBatch) -> Tensor:
    """Crop ``CROP`` of one picture's side at a place drawn for its name, and enlarge it to the picture's size.

    Args:
        private: A batch of one picture.

    Returns:
        (1, 3, size, size).
    """
    (name,), size = private.pictures, private.clean.shape[-1]
    side = round(CROP * size)
    generator = torch_generator(0, "another crop", name)
    row, column = torch.randint(size - side + 1, (2,), generator=generator).tolist()
    crop = private.clean[..., row : row + side, column : column + side]
    return F.interpolate(crop, size, mode="bicubic", align_corners=False).clamp(0, 1)
