"""The one birthplace of uploads: direct mode, Flower's clients and training all make them here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.arithmetic import computing
from fedmjp.config import ModelConfig
from fedmjp.data.crops import random_crop
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import Selection
from fedmjp.defences.base import Arranged, Client
from fedmjp.errors import BadInputError
from fedmjp.jigsaw import rearrange
from fedmjp.models.build import build_vit, with_weights
from fedmjp.models.classifier import Classifier, VitClassifier
from fedmjp.models.roles import roles_of
from fedmjp.private import PrivateBatch
from fedmjp.randomness import Randomness, SeededRandomness
from fedmjp.records import Upload, weights_digest
from fedmjp.seeds import numpy_generator
from fedmjp.setups import BatchSetup
from fedmjp.tensors import average_updates
from fedmjp.threat import ThreatModel
from fedmjp.updates import local_update


@dataclass(frozen=True)
class Exchange:
    """An upload and, for the evaluator alone, the private batch that it was computed from."""

    private: PrivateBatch
    upload: Upload
    # Where the server had changed the weights, by client behind the upload: the tensors that it had sent instead.
    changed: tuple[Mapping[str, Tensor], ...] = ()

    def model(self, scenario: BatchSetup) -> VitClassifier:
        """Build the model with the weights that the server had sent for the upload, to a scenario's first round.

        Args:
            scenario: Gives the honest weights.
        """
        return with_weights(_initial_model(scenario.network, scenario.device), self.changed[0] if self.changed else {})


def exchange(
    scenario: BatchSetup, pictures: Sequence[LabelledPicture], *, model: VitClassifier | None = None, number: int = 0
) -> Exchange:
    """Make an upload and what is behind it; ``Scenario.exchange`` calls this.

    Args:
        scenario: Who computes what, and how clients protect it.
        pictures: As many as are behind one upload.
        model: With the weights that the server had sent; None draws the initial ones.
        number: How many uploads of them were made before, besides probes.

    Raises:
        BadInputError: If there are more or fewer pictures than one upload is of, or a label is unknown.
        DefenceError: If a defence cannot protect the update.
    """
    if len(pictures) != scenario.threat.pictures:
        raise BadInputError(
            f"{len(pictures)} pictures were given, an upload of this scenario is of {scenario.threat.pictures}: give "
            "so many, or set batch_size"
        )
    for picture in pictures:
        if not 0 <= picture.label < scenario.model.classes:
            raise BadInputError(
                f"picture {picture.name!r} has label {picture.label}, but the model knows {scenario.model.classes} "
                "classes: give it one that the model knows"
            )
    model = _initial_model(scenario.network, scenario.device) if model is None else model
    changed = change_weights(scenario, model, pictures)
    digest = weights_digest({**model.state_dict(), **(changed[0] if changed else {})})
    first = number + scenario.probes
    batches, uploads = [], []
    for place in range(first, first + scenario.uploads_per_picture):
        private = prepare_private(scenario, pictures, place)
        update = compute_update(scenario, model, private, place, changed)
        batches.append(private)
        uploads.append(make_upload(scenario, update, private, server_round=place + 1, node=0, weights=digest))
    return Exchange(batches[0], replace(uploads[0], others=tuple(uploads[1:])), changed)


def change_weights(
    scenario: BatchSetup, model: VitClassifier, pictures: Sequence[LabelledPicture]
) -> tuple[Mapping[str, Tensor], ...]:
    """Play a server that changes weights: make what it sends to each client behind the uploads of some pictures.

    It probes them first, if it needs to.

    Args:
        scenario: Names the server.
        model: With honest weights.
        pictures: As many as are behind one upload.

    Returns:
        By client, the tensors that differ from the model's; empty for an honest server.
    """
    if scenario.server is None:
        return ()
    server, learnt = scenario.server.build(), None
    for number in range(scenario.probes):
        private = prepare_private(scenario, pictures, number)
        probes = [server.probe(model, scenario.threat)] * scenario.threat.pipeline.clients
        update = compute_update(scenario, model, private, number, probes)
        upload = make_upload(scenario, update, private, server_round=number + 1, node=0, weights="")
        learnt = server.learn(replace(upload, labels=None), model, scenario.threat)
    return tuple(server.weights(model, scenario.threat, learnt))


@lru_cache(maxsize=2)
def _initial_model(network: ModelConfig, device: str) -> VitClassifier:
    return build_vit(network).to(device)


def prepare_private(scenario: BatchSetup, pictures: Sequence[LabelledPicture], number: int) -> PrivateBatch:
    """Prepare the pictures of an upload: as they are, and as they go into the network.

    A puzzle depends on (seed, ratio, picture, number) alone, so that every model and attack meets the same; a crop on
    (seed, picture, number) and the scale. Where crops are taken, they are the private pictures.

    Args:
        scenario: States defences, crops and mixing.
        pictures: Of one client, or of all behind one upload.
        number: How many uploads of them were made before.
    """
    whole = torch.stack([picture.image for picture in pictures])
    clean = whole if scenario.crop_scale is None else _cropped(scenario, pictures, scenario.crop_scale, number)
    ratio, grid = scenario.pipeline.mask_ratio, scenario.model.grid
    repetition = (number,) if number else ()  # the first does not depend on whether there are more
    sources = [SeededRandomness(scenario.seed, ("jigsaw", ratio, picture.name, *repetition)) for picture in pictures]
    labels = torch.tensor([picture.label for picture in pictures])
    mixed, shares = _mixed(scenario, pictures, clean, labels, number) if scenario.mixup else (None, None)
    entered = clean if mixed is None else mixed
    arranged = scenario.pipeline.arrange(entered, grid, randomness=sources)
    moved = ratio and not scenario.pipeline.shuffles  # what a shuffle by the same mask would have made of them
    shuffled = rearrange(entered, arranged.source) if moved else arranged.images
    return PrivateBatch(
        clean=clean,
        shuffled=shuffled,
        mask=arranged.mask,
        source=arranged.source,
        labels=labels,
        pictures=tuple(picture.name for picture in pictures),
        gradient_of=scenario.gradient_of,
        mixed=mixed,
        shares=shares,
        whole=None if scenario.crop_scale is None else whole,
    )


def _cropped(scenario: BatchSetup, pictures: Sequence[LabelledPicture], scale: float, number: int) -> Tensor:
    """Take a random crop of each picture."""
    sources = [numpy_generator(scenario.seed, "crop", picture.name, number) for picture in pictures]
    drawn = zip(pictures, sources, strict=True)
    return torch.stack([random_crop(picture.image, scale, generator=generator) for picture, generator in drawn])


def _mixed(
    scenario: BatchSetup, pictures: Sequence[LabelledPicture], clean: Tensor, labels: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    """Mix each client's pictures and labels in pairs, the first with the last, by one share as timm does."""
    size, hot = scenario.batch_size, F.one_hot(labels, scenario.model.classes).float()
    images, shares = [], []
    for first in range(0, len(pictures), size):
        part = slice(first, first + size)
        generator = numpy_generator(scenario.seed, "mixup", *(picture.name for picture in pictures[part]), number)
        share = float(generator.beta(scenario.mixup, scenario.mixup))
        images.append(share * clean[part] + (1 - share) * clean[part].flip(0))
        shares.append(share * hot[part] + (1 - share) * hot[part].flip(0))
    return torch.cat(images), torch.cat(shares)


def prepare_round(scenario: BatchSetup, selection: Selection, client: int, server_round: int) -> PrivateBatch:
    """Prepare the pictures of one client's upload in one round.

    Args:
        scenario: States which batch the round is of.
        selection: The pictures of all clients.
        client: From 0.
        server_round: From 1.

    Raises:
        DataError: If a picture cannot be read.
    """
    turn = scenario.turn(server_round)
    first = turn.batch * scenario.batch_size
    entries = selection.partition(client, scenario.clients)[first : first + scenario.batch_size]
    return prepare_private(scenario, [selection.load(entry) for entry in entries], turn.number)


def compute_update(
    scenario: BatchSetup,
    model: VitClassifier,
    private: PrivateBatch,
    number: int,
    changed: Sequence[Mapping[str, Tensor]] = (),
) -> dict[str, Tensor]:
    """Compute the update that reaches the server: one client's, or the mean over those whose updates are summed.

    Args:
        scenario: States step and defences.
        model: With the weights that the server had sent.
        private: Of all clients whose updates are one upload, in their order.
        number: How many uploads of these pictures were made before.
        changed: By client, the tensors that the server had sent in place of the model's; empty for none.

    Raises:
        DefenceError: If a defence cannot protect an update.
    """
    size = scenario.batch_size
    shares = [private.part(first, first + size) for first in range(0, len(private.pictures), size)]
    models = (with_weights(model, weights) for weights in changed or [{}] * len(shares))
    return average_updates(
        [compute_client_update(scenario, *pair, number) for pair in zip(models, shares, strict=True)]
    )


def compute_client_update(
    scenario: BatchSetup, model: VitClassifier, private: PrivateBatch, number: int
) -> dict[str, Tensor]:
    """Compute and protect the update of one client.

    Args:
        scenario: States step and defences.
        model: With the weights that the server had sent.
        private: Of this client.
        number: How many uploads of these pictures were made before.

    Raises:
        DefenceError: If a defence cannot protect it.
    """
    randomness = _defence_randomness(scenario, private, number)
    update = local_update(model, private, scenario.threat, randomness=randomness)
    return protect(scenario, update, private, model, number)


def protect(
    scenario: BatchSetup, update: dict[str, Tensor], private: PrivateBatch, model: Classifier, number: int
) -> dict[str, Tensor]:
    """Protect the update of a private batch before it leaves the client.

    Args:
        scenario: States the defences.
        update: Tensors by name; a part of them where every defence has scope "tensor".
        private: The batch behind it.
        model: With the weights that the server had sent.
        number: How many uploads of these pictures were made before.

    Raises:
        DefenceError: If a defence cannot protect it.
    """
    if not scenario.defences:
        return update
    threat, randomness = scenario.threat, _defence_randomness(scenario, private, number)
    arranged = Arranged(private.version(private.gradient_of), private.mask, private.source)
    examples = len(private.pictures)
    return protect_trained(update, model, threat, examples=examples, arranged=[arranged], randomness=randomness)


def protect_trained(
    update: dict[str, Tensor],
    model: Classifier,
    threat: ThreatModel,
    *,
    examples: int,
    arranged: Sequence[Arranged],
    randomness: Randomness,
) -> dict[str, Tensor]:
    """Protect an update before it leaves the client, whatever it was computed with.

    Args:
        update: Gradient or change of the weights.
        model: With the weights that the server had sent.
        threat: States the defences.
        examples: Pictures behind it.
        arranged: Batches as they went into the network, as far as defences compute with them.
        randomness: Source of what defences draw.

    Raises:
        DefenceError: If a defence cannot protect it.
    """
    images = torch.cat([batch.images for batch in arranged]) if arranged else None
    mask = torch.cat([batch.mask for batch in arranged]) if arranged and model.defended else None
    client = Client(threat.update, roles_of(model), examples, model, images, mask)
    with computing("float32", model.mean.device):
        return threat.pipeline.protect(update, client, randomness=randomness)


def _defence_randomness(scenario: BatchSetup, private: PrivateBatch, number: int) -> SeededRandomness:
    """Make the source of what defences draw for one upload of one client.

    Args:
        scenario: Gives the seed.
        private: Of this client.
        number: How many uploads of these pictures were made before.
    """
    return SeededRandomness(scenario.seed, ("defences", *private.pictures, number))


def make_upload(
    scenario: BatchSetup,
    update: dict[str, Tensor],
    private: PrivateBatch,
    *,
    server_round: int,
    node: int,
    weights: str,
) -> Upload:
    """Make the upload as the server has it, with the labels where it is told them.

    Args:
        scenario: States kind and knowledge.
        update: Protected tensors by name.
        private: The batch behind it.
        server_round: From 1.
        node: Of the client.
        weights: Digest of the weights that the server had sent.
    """
    return Upload(
        tensors=update,
        kind=scenario.update,
        num_examples=len(private.pictures),
        server_round=server_round,
        node=node,
        weights=weights,
        labels=tuple(sorted(private.labels.tolist())) if scenario.labels_known else None,
    )
