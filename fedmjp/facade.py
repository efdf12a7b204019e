"""What `import fedmjp` offers: a benchmark in a few lines of Python."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
from fedmjp.errors import BadInputError
from fedmjp.metrics.gallery import Gallery
from fedmjp.metrics.scoring import score_features, score_pictures, score_visible
from fedmjp.models.adopt import Adopted
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import ATTACKED, Disclosure, Features, Upload, require_weights, weights_digest
from fedmjp.scenario import Scenario
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel

METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")


def bundled_pictures(count: int, *, size: int = 224) -> list[LabelledPicture]:
    """Load pictures that ship with the package, with ImageNet labels.

    Args:
        count: How many, at most eight.
        size: Pixels per side.

    Raises:
        BadInputError: If there are fewer.
    """
    source = open_source("bundled", size=size, classes=1000)
    names = source.names()
    if not 1 <= count <= len(names):
        raise BadInputError(f"{count} pictures were asked for; there are 1 to {len(names)} bundled ones")
    return [source.load(name) for name in names[:count]]


def attack(
    name: str,
    upload: Upload,
    against: Scenario | Adopted,
    *,
    options: Mapping[str, Any] | None = None,
    model: VitClassifier | None = None,
    threat: ThreatModel | None = None,
    seed: int = 0,
) -> Disclosure:
    """Attack an upload as a server would: reconstruct its pictures, or tell features and labels.

    Args:
        name: Of the attack, see ``fedmjp.ATTACKS``.
        upload: As ``scenario.exchange`` or ``adopted.upload`` gives it.
        against: The scenario that it is of, or the adopted model.
        options: Of the attack.
        model: With the weights that the server had sent; None draws the scenario's initial ones. Of a server that
            changes weights, ``exchange.model(scenario)`` has them.
        threat: What the server knows; None takes the scenario's, or a plain gradient of the upload's pictures.
        seed: Of what the attack draws.

    Of an adopted model's upload, a warning says what it shows besides: patches without a gradient, another height and
    width or range of values than the model's, or how much of it is left unexplained.

    Raises:
        UnknownNameError: If there is no such attack.
        AttackNotApplicableError: If the attack cannot exploit such uploads; an adopted model's, if it is not of one
            picture and does not say so, or of one that was normalised otherwise.
        BadInputError: If the upload was computed from other weights than the model has.
    """
    from fedmjp.attacks.adversary import Adversary  # noqa: PLC0415 (what is shared does not import who attacks)

    if isinstance(against, Scenario):
        attacked_model: Any = build_vit(against.network).to(against.device) if model is None else model
        view = against.threat if threat is None else threat
        require_weights(upload, weights_digest(attacked_model.state_dict()))
    else:
        update: Any = upload.kind if upload.kind in ATTACKED else "gradient"  # then the attack refuses the upload
        attacked_model, view = against, threat or ThreatModel(update=update, batch_size=upload.num_examples)
        require_weights(upload, against.weights)
    adversary = Adversary(attacked_model, view, seed)
    if isinstance(against, Adopted):
        adversary, notes = adversary.fit(name, upload, options or {})
        for note in notes:
            warnings.warn(f"{name}: {note}", stacklevel=2)
    return adversary.reconstruct(name, [upload], options or {}, on_progress=lambda _done, _total, _loss: None)[0]


def score(
    result: Disclosure,
    private: PrivateBatch,
    *,
    setting: str = "a",
    metrics: tuple[str, ...] = METRICS,
    model: VitClassifier | None = None,
    gallery: Sequence[PrivateBatch] = (),
) -> dict[str, Tensor]:
    """Score what was disclosed against the private pictures.

    Args:
        result: Of ``attack``.
        private: Of the exchange that the upload came from.
        setting: "a" (gradient of x, compared with x), "b" (x~ with x~) or "c" (x~ with x).
        metrics: Names, see ``fedmjp.METRICS``; those that lack something on this machine are left out. Labels and
            features have metrics of their own, and all of these are given.
        model: That the upload was computed with; needed for features alone.
        gallery: Other pictures, from which features have to tell the private ones.

    Returns:
        Name to a value per private picture, in their order. Where the upload holds nothing of some patches, as of
        dropped tokens, ``psnr_visible`` is the PSNR of the others.

    Raises:
        BadInputError: If there is no such setting, or features come without the model.
        RecordError: If the upload was not computed from the version that the setting asks for.
    """
    if setting not in set(Setting):
        raise BadInputError(f"setting {setting!r} is not one of {', '.join(Setting)}")
    compared = Setting[setting.upper()]
    if isinstance(result, Features):
        if result.features is not None and model is None:
            raise BadInputError("features are compared with those of the private pictures: give the model")
        batches, weights = [private, *gallery], "" if model is None else weights_digest(model.state_dict())
        features = None if model is None else Gallery.of(model, weights, batches, {compared.compared_with})
        values = score_features(result, private, compared, features)
    else:
        values = score_pictures(result, private, compared, metrics=metrics, protocol="float")
        values |= score_visible(result, private, compared)
    return {name: value for name, value in values.items() if value is not None}
