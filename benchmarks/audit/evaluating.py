"""The evaluator's side of an audit: what hooks saw of private batches, against what attacks disclosed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmjp.attacks.embedding_rows import NAME as EMBEDDING_ROWS
from fedmjp.attacks.embedding_rows import Tokens
from fedmjp.benchmarks.audit.attacking import Attempt
from fedmjp.benchmarks.audit.network import Network
from fedmjp.metrics import metric
from fedmjp.models.layers import inputs_of, training_copy
from fedmjp.records import Features, Reconstruction

CHANNELS = (1, 3)
SSIM_WINDOW = 11  # pixels
ABOVE_FLOOR = 3.0  # dB by which a picture must come back better than its mean colour, to count as leaking
RECOGNISABLE, ABOVE_SSIM_FLOOR = 0.5, 0.2  # the same by structural similarity, and by more than its mean colour
NEAR_FEATURE = 0.05  # of a feature's distance from the mean of all, or of one record's from a record of zeros
# Attacks whose reason is told where nothing applies.
WHY_NOT = (EMBEDDING_ROWS, "linear_inputs", "feature_inversion", "patch_embedding")
HEAD_FEATURES, LAYER_FEATURES = 8, 128  # examples that are compared at most


@dataclass(frozen=True)
class Private:
    """What is behind one upload, as the network was given it; no attack has a parameter for it."""

    entered: tuple[Tensor, ...]  # every batch's largest tensor, (batch, ...) as it went into the network
    pictures: Tensor | None  # (n, 1 or 3, height, width) in [0, 1], or None where no pictures went in
    labels: Tensor | None  # (n,)

    @property
    def side(self) -> int:
        """Return the pictures' pixels per side; 0 without pictures."""
        return 0 if self.pictures is None else int(self.pictures.shape[-1])


def read_batches(path: Path) -> list[dict[str, Tensor]]:
    """Read batches that hooks kept, each as tensors by the name under which they entered; none without a file.

    Args:
        path: Of the file, which may be missing.
    """
    batches: dict[int, dict[str, Tensor]] = {}
    if path.exists():
        with np.load(path) as file:
            for key in file.files:
                place, _, name = key.partition("/")
                batches.setdefault(int(place), {})[name] = torch.from_numpy(file[key])
    return list(batches.values())


def read_private(folder: Path, message: str, mean: Sequence[float], std: Sequence[float]) -> Private | None:
    """Read what hooks kept of one training message; None if they kept nothing.

    Args:
        folder: The evaluator's.
        message: Identifier of the training message.
        mean: Of each channel, as the app normalises it.
        std: Standard deviation, likewise.
    """
    path = folder / f"{message}.npz"
    if not path.exists():
        return None
    entered, labels = [], []
    examples: set[bytes] = set()  # one that enters again, in another pass, counts once
    for batch in read_batches(path):
        inputs = {name: tensor for name, tensor in batch.items() if name != "target" and tensor.ndim > 1}
        kept: list[bool] | slice = slice(None)
        if inputs:
            largest = max(inputs.values(), key=lambda tensor: tensor.numel())
            kept = _add_examples(largest, examples)
            entered.append(largest[kept])
        target = batch.get("target", next((t for n, t in batch.items() if n.endswith("labels")), None))
        classes = None if target is None else _class_numbers(target)
        if classes is not None:
            labels.append(classes[kept] if not inputs or len(classes) == len(largest) else classes)
    entered = [batch for batch in entered if len(batch)]
    return Private(tuple(entered), _pictures(entered, mean, std), torch.cat(labels).long() if labels else None)


def _class_numbers(target: Tensor) -> Tensor | None:
    """Read the class of each example from a target; None where it holds none, as pictures and measurements do."""
    if target.ndim == 2 and target.shape[1] > 1 and target.is_floating_point():
        is_share = bool((target >= 0).all()) and torch.allclose(target.sum(1), torch.ones(len(target)), atol=1e-3)
        return target.argmax(1) if is_share else None
    if target.ndim == 1 or (target.ndim == 2 and target.shape[1] == 1):
        is_whole = not target.is_floating_point() or bool((target == target.round()).all())
        return target.flatten() if is_whole else None
    return None


def _add_examples(batch: Tensor, examples: set[bytes]) -> list[bool]:
    """Add a batch's examples to those that entered before, and tell of each whether it is new."""
    is_new = []
    for example in batch:
        digest = sha256(example.numpy().tobytes()).digest()
        is_new.append(digest not in examples)
        examples.add(digest)
    return is_new


def read_trained(folder: Path, message: str) -> dict[str, Tensor]:
    """Read the weights that hooks saw at the end of a client's training; empty if it trained nothing.

    Args:
        folder: The evaluator's.
        message: Identifier of the training message.
    """
    path = folder / f"{message}-trained.npz"
    if not path.exists():
        return {}
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def _pictures(entered: Sequence[Tensor], mean: Sequence[float], std: Sequence[float]) -> Tensor | None:
    batches = [tensor for tensor in entered if tensor.ndim == 4 and tensor.shape[1] in CHANNELS]
    if not batches or len({tensor.shape[1:] for tensor in batches}) > 1:
        return None
    whole = torch.cat(batches).float()
    centre, scale = (torch.tensor(values[: whole.shape[1]]).view(1, -1, 1, 1) for values in (mean, std))
    return (whole * scale + centre).clamp(0, 1)


def score_pictures(reconstruction: Reconstruction, pictures: Tensor) -> list[dict[str, float]]:
    """Score the best recovery of each private picture, beside its mean colour alone.

    Args:
        reconstruction: What an attack recovered.
        pictures: Private ones (n, 1 or 3, height, width) in [0, 1].
    """
    colour = pictures.expand(-1, 3, -1, -1)
    distinct = torch.unique(reconstruction.images, dim=0)
    if distinct.shape[-2:] != colour.shape[-2:]:
        return []
    scores = []
    for picture in colour:
        target = picture[None].expand(len(distinct), -1, -1, -1)
        psnr = metric("psnr").function(distinct, target)
        place = int(psnr.argmax())
        colour_alone = picture.mean(dim=(1, 2), keepdim=True).expand_as(picture)
        true, recovered, blank = (
            _at_least(image[None], SSIM_WINDOW) for image in (picture, distinct[place], colour_alone)
        )
        ssim, ssim_floor = (float(metric("ssim").function(image, true)) for image in (recovered, blank))
        floor = float(metric("psnr").function(blank, true))
        scores.append(
            {"psnr": float(psnr[place]), "ssim": ssim, "floor": floor, "ssim_floor": ssim_floor, "place": place}
        )
    return scores


def _is_back(score: Mapping[str, float]) -> bool:
    """Tell whether a picture came back: by its pixels, or recognisably, where only brightness and contrast are off."""
    recognisable = score["ssim"] >= max(RECOGNISABLE, score["ssim_floor"] + ABOVE_SSIM_FLOOR)
    return score["psnr"] > score["floor"] + ABOVE_FLOOR or recognisable


def _at_least(images: Tensor, side: int) -> Tensor:
    """Repeat pixels of pictures that are smaller than a window; others stay as they are."""
    factor = -(-side // min(images.shape[-2:]))
    return images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)


def score_labels(labels: Tensor, true: Tensor) -> float:
    """Compute the share of the labels that are right, in any order.

    Args:
        labels: Recovered ones (n,).
        true: Private ones (n,).
    """
    right = Counter(labels.tolist()) & Counter(true.tolist())
    return sum(right.values()) / len(true)


def labels_floor(true: Tensor, network: Network) -> float:
    """Compute the share that a guess of as many labels of each class gets right.

    Args:
        true: Private labels (n,).
        network: The app's, with the weights that the server sent.
    """
    classes = 1 if network.head is None else len(network.module.get_parameter(network.head[1]))
    return sum(min(count, len(true) / classes) for count in Counter(true.tolist()).values()) / len(true)


def score_classes(raised: Sequence[int], true: Tensor, classes: int) -> dict[str, Any]:
    """Count the classes that a client holds, those that were named, and those named rightly.

    Args:
        raised: Classes that an attack named.
        true: Private labels (n,).
        classes: Number of classes of the network.
    """
    really = set(true.tolist())
    return {
        "held": len(really),
        "named": len(raised),
        "right": len(really & set(raised)),
        "classes": classes,
    }


class FeatureScores(NamedTuple):
    """Distances of private features to the nearest disclosed ones, relative to those of a guess."""

    errors: list[float]
    are_records: bool  # whether the features are the records themselves


def score_features(
    features: Tensor, network: Network, private: Private, layer: str | None = None
) -> FeatureScores | None:
    """Measure each private feature's distance to the nearest disclosed one, relative to that of a guess.

    The guess is the mean of all; where that is no guess, as of one record, the features of a record of zeros.

    Args:
        features: Disclosed ones (m, width).
        network: The app's, with the weights that the server sent.
        private: What is behind the upload.
        layer: That reads the features, as in training; None for the last one, in evaluation mode.
    """
    if not private.entered or (layer is None and (network.head is None or private.pictures is None)):
        return None
    module = network.module if layer is None else training_copy(network.module)
    name = layer if layer is not None else network.head[0].rpartition(".")[0]  # type: ignore[index]
    limit = HEAD_FEATURES if layer is None else LAYER_FEATURES
    try:
        with torch.no_grad():
            entered = torch.cat([inputs_of(module, name, batch) for batch in private.entered])[:limit]
            zero = inputs_of(module.eval(), name, torch.zeros_like(private.entered[0][:1]))
    except Exception:  # noqa: BLE001 (a network that wants more than one tensor)
        return None
    if entered.shape[1] != features.shape[1]:
        return None
    distances = torch.cdist(entered.double(), features.double(), compute_mode="donot_use_mm_for_euclid_dist")
    of_mean, of_zero = ((entered - guess).double().norm(dim=1) for guess in (entered.mean(0), zero))
    relative = distances.min(dim=1).values / torch.where(of_mean > NEAR_FEATURE * of_zero, of_mean, of_zero)
    records = torch.cat([batch.flatten(1) for batch in private.entered])[:limit]
    return FeatureScores(relative.tolist(), records.shape == entered.shape and torch.equal(records, entered))


def score_tokens(tokens: Tokens, private: Private) -> dict[str, Any]:
    """Count the different tokens of the texts that were named, beside a guess of as many tokens.

    Args:
        tokens: That an attack named.
        private: What is behind the upload.
    """
    true = {int(token) for batch in private.entered for token in torch.unique(batch)} - {tokens.padding}
    named = set(tokens.rows.tolist())
    return {
        "kind": "tokens", "tokens": len(true), "tokens_named": len(named), "tokens_right": len(true & named),
        "tokens_floor": round(len(true) / tokens.vocabulary, 4), "vocabulary": tokens.vocabulary,
    }  # fmt: skip


def scored(attempt: Attempt, private: Private, network: Network) -> dict[str, Any]:
    """Score an attempt's result in plain values; empty where nothing can be compared.

    Args:
        attempt: Of an attack.
        private: What is behind the upload.
        network: The app's, with the weights that the server sent.
    """
    disclosure = attempt.made
    if isinstance(disclosure, Tokens):
        return score_tokens(disclosure, private)
    if isinstance(disclosure, Reconstruction) and private.pictures is not None:
        scores = score_pictures(disclosure, private.pictures)
        if not scores:
            return {}
        over = [score for score in scores if _is_back(score)]
        ordered = sorted(score["psnr"] for score in scores)
        return {
            "pictures": len(scores),
            "above_floor": len(over),
            "psnr_median": round(ordered[len(ordered) // 2], 2),
            "psnr_worst_case": round(ordered[-1], 2),
            "ssim_worst_case": round(max(score["ssim"] for score in scores), 3),
            "floor_of_best": round(max(scores, key=lambda score: score["psnr"])["floor"], 2),
            "floor_median": round(sorted(score["floor"] for score in scores)[len(scores) // 2], 2),
        }
    if isinstance(disclosure, Features):
        values: dict[str, Any] = {}
        if private.labels is not None and bool((disclosure.labels >= 0).any()):
            values["labels_right"] = round(score_labels(disclosure.labels, private.labels), 3)
            values["labels_floor"] = round(labels_floor(private.labels, network), 3)
            values["labels"] = len(private.labels)
        if disclosure.features is not None:
            scores_of_features = score_features(disclosure.features, network, private, disclosure.layer)
            if scores_of_features is not None:
                errors = scores_of_features.errors
                values["kind"] = "rows" if scores_of_features.are_records else "features"
                values["features"] = len(errors)
                values["features_near"] = sum(error < NEAR_FEATURE for error in errors)
                values["feature_error_median"] = round(sorted(errors)[len(errors) // 2], 4)
                values["feature_error_best"] = float(f"{min(errors):.2g}")
        return values
    return {}


def leaking(values: Mapping[str, Any]) -> bool:
    """Tell whether scores of pictures are a leak against the policy.

    Args:
        values: Scores of one attempt.
    """
    return bool(values.get("above_floor"))


def summarise_records(rows: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> dict[str, Any]:
    """Name the attack that got most of the records back, by what came back: pictures, whole rows, else features.

    Args:
        rows: Scores of attacks, as the report has them.
        reasons: By attack, why it does not apply.
    """
    candidates = list(_returned(rows))
    if not candidates:
        why = next((reasons[name] for name in WHY_NOT if name in reasons), None)
        return {
            "came_back": 0, "of": 0, "attack": None, "kind": "pictures", "best": None, "floor": None, "unit": "dB",
            "why": why,
        }  # fmt: skip
    strongest: dict[str, Any] = max(candidates, key=_worth)
    return {**strongest, "why": None}


def returned_levels(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List the levels at which records came back, pictures and rows before features, each by its best attack.

    Args:
        rows: Scores of attacks, as the report has them.
    """
    best: dict[str, dict[str, Any]] = {}
    for candidate in sorted(_returned(rows), key=_worth, reverse=True):
        if candidate["came_back"]:
            best.setdefault(candidate["kind"], candidate)
    return list(best.values())


def _returned(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what each attack got back of records: how many, at which level, and its best figure beside a guess's."""
    for row in rows:
        if row["role"] != "attack":
            continue
        if "psnr_worst_case" in row:
            yield {
                "came_back": row["above_floor"], "of": row["pictures"], "kind": "pictures", "unit": "dB",
                "best": row["psnr_worst_case"], "floor": row["floor_of_best"], "attack": row["attack"],
            }  # fmt: skip
        if "tokens" in row:
            share = row["tokens_right"] / max(row["tokens_named"], 1)
            yield {
                "came_back": row["tokens_right"] if share > row["tokens_floor"] else 0, "of": row["tokens"],
                "kind": "tokens", "unit": "share right", "best": round(share, 4), "floor": row["tokens_floor"],
                "attack": row["attack"],
            }  # fmt: skip
        elif "kind" in row:
            yield {
                "came_back": row["features_near"], "of": row["features"], "kind": row["kind"],
                "unit": "relative error", "best": row["feature_error_best"], "floor": 1.0, "attack": row["attack"],
            }  # fmt: skip


def _worth(candidate: dict[str, Any]) -> tuple[int, bool, int, float]:
    """Rank what came back: whole records before features, then how many, then how well."""
    is_whole, best = candidate["kind"] in ("pictures", "rows"), float(candidate["best"])
    level = 1 + is_whole if candidate["came_back"] else 0
    return level, is_whole, candidate["came_back"], -best if candidate["unit"] == "relative error" else best
