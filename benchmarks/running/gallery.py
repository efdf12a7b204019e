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
    """What the network that was sent makes of all pictures of an experiment; the pictures themselves are not kept.

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
        """The gallery of these pictures in these versions; of a picture that occurs twice, the first is taken."""
        seen: dict[str, dict[str, Tensor]] = {}
        for batch in batches:
            for place, name in enumerate(batch.pictures):
                if name not in seen:
                    one = batch.part(place, place + 1)
                    masks = {Picture.CLEAN: None, Picture.SHUFFLED: one.mask}
                    shown = {str(which): _seen(model, weights, one.version(which), masks[which]) for which in versions}
                    seen[name] = shown | {"crop": _seen(model, weights, another_crop(one))}
        of_version = {version: torch.cat([one[str(version)] for one in seen.values()]) for version in versions}
        return cls(model, weights, tuple(seen), of_version, torch.cat([one["crop"] for one in seen.values()]))

    def places(self, private: PrivateBatch) -> Tensor:
        """(batch,) int64, where the pictures of a batch are; RecordError if one is not among them."""
        known = {name: place for place, name in enumerate(self.names)}
        missing = [name for name in private.pictures if name not in known]
        if missing:
            raise RecordError(f"the gallery lacks {', '.join(missing)}")
        return torch.tensor([known[name] for name in private.pictures])

    def behind(self, private: PrivateBatch) -> Tensor:
        """(batch, dim) float64, features of what went into the network."""
        shown = private.version(private.gradient_of)
        parts = zip(shown[:, None], private.mask[:, None], strict=True)
        return torch.cat([_seen(self.model, self.weights, image, mask) for image, mask in parts])


def _seen(model: VitClassifier, weights: str, image: Tensor, mask: Tensor | None = None) -> Tensor:
    """(1, dim) float64 of one picture: alone, so that no feature depends on others."""
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


# Galleries of one model share what it saw, whatever clients do to their updates.
_features: OrderedDict[tuple[str, str, str], Tensor] = OrderedDict()


def another_crop(private: PrivateBatch) -> Tensor:
    """(1, 3, size, size): ``CROP`` of one picture's side at a place drawn for its name, enlarged to its size."""
    (name,), size = private.pictures, private.clean.shape[-1]
    side = round(CROP * size)
    generator = torch_generator(0, "another crop", name)
    top, left = torch.randint(size - side + 1, (2,), generator=generator).tolist()
    crop = private.clean[..., top : top + side, left : left + side]
    return F.interpolate(crop, size, mode="bicubic", align_corners=False).clamp(0, 1)
