"""Fishing where clients take steps of AdamW: the weights that a server sends, and how it reads the clients'.

AdamW divides each entry of a gradient by its size, unless it is below epsilon (``fedmjp.attacks.adamw``). So gradients
of the body are made that small, by a class token so long that the last LayerNorm, which divides by its length, leaves
next to nothing. Gradients behind the LayerNorm stay large, and AdamW moves what is there by whole steps, which must not
change logits. So the LayerNorm's weight is larger than float32 has digits for a step, and its bias undoes what the
weight makes of the class token: the feature of every picture is zero after every step, and no row of the head moves a
logit. Biases do, by a learning rate a step: label smoothing stays met to some percent. So only the step that shows the
wanted picture has a gradient in the body, and it comes out of the weights after an epoch.

All other tokens are made smaller: a step is then larger beside the rounding of the weights that make them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fedmjp.arithmetic import computing
from fedmjp.attacks.adamw import EPSILON, SHOWN, changed_entries, gradient_behind, tensor_behind, total_move
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.roles import roles_of
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier
    from fedmjp.records import Upload

LONG = 2.0**50  # entries of the class token; a power of two is divided by without rounding
STEADY = 2.0**26  # learning rates: two of them less, in float32, is the same number
CODED = 1e10  # the same while labels are read: codes of classes are then longer than steps, and logits still precise
# Of tokens. An eighth gave 10 dB more than the tokens as they are, a 32nd less on DeiT-S: LayerNorm's epsilon shows.
SMALLER = 1 / 8
# Sizes of gradients, in epsilons, that steps show best: once, and again and again, where they must not move weights.
ONCE, OFTEN = 1.0, 0.003
CODES = 0.01  # the same of codes, whose sum is read where weights are zero
SILENT = 1e-4  # of the largest row of the position embedding's gradient: what other pictures leave in masked ones
MATCHED = 1e-3  # learning rates by which a bias may miss what it moves by where its class occurs so often
PASSES = 3  # over which probabilities settle


def adamw_refusal(server: str, model: VitClassifier, threat: ThreatModel) -> str | None:
    """Say why steps of AdamW cannot be fished in; None if they can, or clients take none.

    Args:
        server: Its name, with which the reason begins.
        model: The clients' model.
        threat: States the recipe.
    """
    if threat.local_optimiser != "adamw":
        return None
    if not model.prefix_tokens or names.CLASS_TOKEN not in dict(model.named_parameters()):
        return f"{server}: makes the class token long where clients take steps of AdamW, and the model has none"
    if not model.has_positions:
        return f"{server}: reads the position embedding, which the model does not have"
    for defence in threat.pipeline.defences:
        if names.POSITION_EMBEDDING in defence.withheld(roles_of(model)):
            return f"{server}: reads labels from the position embedding, which {defence.name} keeps at the client"
    return changed_entries(threat) and f"{server}: {changed_entries(threat)}"


def fishing_weights(model: VitClassifier, row: Tensor, threat: ThreatModel) -> tuple[dict[str, Tensor], Tensor]:
    """Make weights of tokens and of the last LayerNorm, and the row that fishes.

    Args:
        model: With honest weights.
        row: (dim,) any row for the head.
        threat: States the recipe.
    """
    import torch

    from fedmjp.models.build import with_weights

    tensors = dict(model.named_parameters())
    token_names = (names.PATCH_WEIGHT, names.PATCH_BIAS, names.POSITION_EMBEDDING, names.UNKNOWN_EMBEDDING)
    sent = {name: SMALLER * tensors[name].detach() for name in token_names if name in tensors}
    signs, gain = _signs(model), 2.0 ** math.ceil(math.log2(STEADY * threat.local_learning_rate))
    sent[names.CLASS_TOKEN] = _long_token(model, LONG)
    sent[names.NORM_WEIGHT], sent[names.NORM_BIAS] = torch.full_like(signs, gain), -gain * signs
    for same in (signs > 0, signs < 0):  # rounded otherwise, a feature has one value on each of them: no logit shows it
        row = row - same * row[same].mean()
    return sent, row * _length(with_weights(model, sent), row, threat)


def _length(model: VitClassifier, row: Tensor, threat: ThreatModel) -> float:
    """Compute the factor of the row at which steps show the gradients of the embeddings best.

    A picture of noise stands for the wanted one: how large gradients are depends on the weights far more than on it.
    """
    import torch

    size = model.image_size
    noise = torch.rand(1, 3, size, size, generator=torch_generator(0, "noise")).to(row)
    mask = torch.zeros(1, model.grid**2, dtype=torch.bool, device=row.device) if model.defended else None
    read = [model.get_parameter(name) for name in (names.POSITION_EMBEDDING, names.PATCH_WEIGHT)]
    with computing("float32", row.device), torch.enable_grad():
        positions, patches = torch.autograd.grad((model.features(noise, mask) @ row).sum(), read)
    sizes = positions[0, model.prefix_tokens :].square().mean().sqrt(), patches.square().mean().sqrt()
    epsilons = ONCE if len(_places(threat, 1)) == 1 else OFTEN
    return epsilons * EPSILON * _step_size(threat) / math.sqrt(float(sizes[0]) * float(sizes[1]))


def isolated_gradient(upload: Upload, model: VitClassifier, threat: ThreatModel) -> Upload:
    """Compute the gradient of the wanted picture in the body from the weight change of an epoch or several.

    An identity tells which of an epoch's steps showed the picture: the gradient of the patches' bias is the sum of
    those at all tokens of patches. It holds where steps are read as they were.

    Args:
        upload: The client's weight change.
        model: With the weights that were sent.
        threat: States the recipe.

    Raises:
        AttackFailedError: If it holds for no step, or tensors of it are withheld.
    """
    if missing := [name for name in step_tensors(threat, model) if name not in upload.tensors]:
        raise AttackFailedError(f"the upload lacks {missing[0]}, which tells the step of the wanted picture")
    places = [_places(threat, first) for first in range(1, _steps_of_epoch(threat) + 1)]
    best = places[0]
    if len(places) > 1:
        misfits = {at: _misfit(upload, model, threat, at) for at in places}
        best = min(places, key=misfits.__getitem__)
        if not misfits[best] < SHOWN:
            raise AttackFailedError("none of an epoch's steps explains how weights of tokens moved")
    tensors = {}
    for name in upload.tensors:
        with suppress(AttackFailedError):  # what steps do not show is not in the upload
            tensors[name] = tensor_behind(upload, name, model, threat, at=best)
    if model.defended and names.POSITION_EMBEDDING in tensors:
        rows = tensors[names.POSITION_EMBEDDING]
        lengths = rows.norm(dim=-1, keepdim=True)
        tensors[names.POSITION_EMBEDDING] = rows.masked_fill(lengths < SILENT * lengths.max(), 0.0)
    if not tensors:
        raise AttackFailedError("how weights moved by steps of AdamW shows no gradient")
    return replace(upload, tensors=tensors, kind="gradient")


def step_tensors(threat: ThreatModel, model: VitClassifier) -> Sequence[str]:
    """List the tensors that tell the step of the wanted picture.

    Args:
        threat: States the recipe.
        model: The clients' model.
    """
    if threat.local_optimiser != "adamw" or _steps_of_epoch(threat) == 1:
        return []
    unknown = [names.UNKNOWN_EMBEDDING] if model.defended else []
    return [names.PATCH_BIAS, names.POSITION_EMBEDDING, *unknown]


def _misfit(upload: Upload, model: VitClassifier, threat: ThreatModel, at: tuple[int, ...]) -> float:
    read = {name: upload.tensors[name] for name in step_tensors(threat, model)}
    gradients = gradient_behind(replace(upload, tensors=read, others=()), model, threat, at=at, signs=True).tensors
    bias = gradients[names.PATCH_BIAS].double()
    tokens = gradients[names.POSITION_EMBEDDING][0, model.prefix_tokens :].double().sum(0)
    if model.defended:
        tokens = tokens + gradients[names.UNKNOWN_EMBEDDING].double().flatten()
    return float((bias - tokens).norm() / bias.norm())


def _step_size(threat: ThreatModel) -> int:
    return threat.local_batch_size or threat.batch_size


def _steps_of_epoch(threat: ThreatModel) -> int:
    return min(threat.batch_size // _step_size(threat), threat.local_steps)


def _places(threat: ThreatModel, first: int) -> tuple[int, ...]:
    """List the steps, from 1, that show a picture, given the first one."""
    return tuple(range(first, threat.local_steps + 1, threat.batch_size // _step_size(threat)))


def _signs(model: VitClassifier) -> Tensor:
    """Draw the signs (dim,) that the last LayerNorm makes of a long class token."""
    import torch

    token = model.get_parameter(names.CLASS_TOKEN).detach()
    signs = torch.ones(token.shape[-1])
    signs[torch.randperm(len(signs), generator=torch_generator(0, "class token"))[::2]] = -1
    return signs.to(token)


def _long_token(model: VitClassifier, length: float) -> Tensor:
    return (length * _signs(model)).expand_as(model.get_parameter(names.CLASS_TOKEN)).clone()


def _feature(model: VitClassifier) -> Tensor:
    """Compute the feature (dim,) that every picture has behind a long class token."""
    weight, bias = (model.get_parameter(name).detach() for name in (names.NORM_WEIGHT, names.NORM_BIAS))
    return weight * _signs(model) + bias


def probing_weights(model: VitClassifier, threat: ThreatModel) -> dict[str, Tensor]:
    """Make weights that show how often each label occurs.

    Where all steps are on the whole batch, the head has a random row per class, behind a long class token: their sum
    over the batch is the gradient of the class token's position. Else the head is dead, so that biases alone move
    probabilities, and how far a bias moved says when and how often its class came.

    Args:
        model: With honest weights.
        threat: States the recipe.
    """
    import torch

    tensors = dict(model.named_parameters())
    sent = {names.HEAD_BIAS: torch.zeros_like(tensors[names.HEAD_BIAS].detach())}
    if _steps_of_epoch(threat) == 1:
        positions = tensors[names.POSITION_EMBEDDING].detach().clone()
        positions[:, 0] = 0  # it moves by less than others are rounded
        sent |= {names.CLASS_TOKEN: _long_token(model, CODED), names.POSITION_EMBEDDING: positions}
        return sent | {names.HEAD_WEIGHT: _codes(model, threat)}
    dead = (names.HEAD_WEIGHT, names.NORM_WEIGHT, names.NORM_BIAS)
    return sent | {name: torch.zeros_like(tensors[name].detach()) for name in dead}


def labels_behind(upload: Upload, model: VitClassifier, threat: ThreatModel) -> tuple[int, ...]:
    """Read the labels behind an answer to ``probing_weights``; a label that comes in several steps counts as two.

    Args:
        upload: The answer.
        model: With honest weights.
        threat: States the recipe.
    """
    import torch

    whole = _steps_of_epoch(threat) == 1
    counts = _coded_counts(upload, model, threat) if whole else _moved_counts(upload, threat)
    return tuple(torch.repeat_interleave(torch.arange(len(counts)), counts).tolist())


def _codes(model: VitClassifier, threat: ThreatModel) -> Tensor:
    """Draw rows (classes, dim) that move no logit and whose sum has a gradient that steps show."""
    import torch

    head, feature = model.get_parameter(names.HEAD_WEIGHT).detach(), _feature(model)
    drawn = torch.randn(head.shape, generator=torch_generator(0, "codes")).to(head)
    drawn = drawn - (drawn @ feature)[:, None] / (feature @ feature) * feature
    return (ONCE if threat.local_steps == 1 else CODES) * EPSILON * CODED * drawn


def _coded_counts(upload: Upload, model: VitClassifier, threat: ThreatModel) -> Tensor:
    """Count each class by the sum over classes of (1 / K - q_c) W_c, with the shares q_c of the targets.

    The last LayerNorm takes out of it what is along the class token and the mean. Of more classes than dimensions,
    those are left out that hold less than an even share: their bias fell.
    """
    import torch

    from fedmjp.models.build import with_weights

    signs, weight = _signs(model).double(), model.get_parameter(names.NORM_WEIGHT).detach().double()
    codes = _codes(model, threat).double() * weight
    codes = codes - codes.mean(1, keepdim=True) - (codes @ signs)[:, None] * signs / len(signs)
    codes = codes / CODED
    with_codes = with_weights(model, probing_weights(model, threat))
    every = tuple(range(1, threat.local_steps + 1))
    position_gradient = tensor_behind(upload, names.POSITION_EMBEDDING, with_codes, threat, at=every, signs=True)[
        0, 0
    ].double()
    classes = len(codes)
    possible = torch.ones(classes, dtype=torch.bool, device=codes.device)
    if classes > codes.shape[1] - 2:
        possible = upload.tensors[names.HEAD_BIAS].to(codes.device) > 0
    labelled_share = 1 - threat.label_smoothing
    shares = torch.linalg.lstsq(
        codes[possible].mT, labelled_share / classes * codes.sum(0) - position_gradient
    ).solution
    counts = torch.zeros(classes, dtype=torch.long)
    counts[possible.cpu()] = (shares * upload.num_examples / labelled_share).round().long().clamp(min=0).cpu()
    return counts


def _moved_counts(upload: Upload, threat: ThreatModel) -> Tensor:
    """Count how often each class must come for its bias to move so far; 2 where no count explains it.

    Probabilities are those of the biases alone: even at first, then as all classes move that are found so.
    """
    import torch

    moved = -upload.tensors[names.HEAD_BIAS].double().cpu() / threat.local_learning_rate
    when = [
        (first, count) for first in range(1, _steps_of_epoch(threat) + 1) for count in range(_step_size(threat) + 1)
    ]
    smoothing = threat.label_smoothing
    shares = torch.full((threat.local_steps, len(when)), smoothing / len(moved), dtype=torch.float64)
    for place, (first, count) in enumerate(when):
        shares[[step - 1 for step in _places(threat, first)], place] += (1 - smoothing) * count / _step_size(threat)
    sums = torch.full((threat.local_steps,), math.log(len(moved)), dtype=torch.float64)
    for _ in range(PASSES):
        expected = _bias_moves(shares, sums, threat)
        misses = (moved[:, None] - expected[-1]).abs()
        nearest = misses.argmin(dim=1)
        sums = (-threat.local_learning_rate * expected[:-1, nearest]).logsumexp(dim=1)
    explained = misses.gather(1, nearest[:, None])[:, 0] < MATCHED
    return torch.where(explained, torch.tensor([count for _, count in when])[nearest], 2)


def _bias_moves(shares: Tensor, sums: Tensor, threat: ThreatModel) -> Tensor:
    """Compute how far biases move from zero before each step and in the end (steps + 1, ...), in learning rates.

    Args:
        shares: (steps, ...) of each step's targets that are the class's.
        sums: (steps,) logarithm of the sum of all classes' exponentials, before each step.
        threat: States the recipe.
    """
    import torch

    gradients, moved = torch.zeros_like(shares), [torch.zeros_like(shares[0])]
    for step in range(len(shares)):
        gradients[step] = (-threat.local_learning_rate * moved[-1] - sums[step]).exp() - shares[step]
        decay = threat.local_weight_decay * threat.local_learning_rate
        moved.append(total_move(gradients[: step + 1], decay))
    return torch.stack(moved)
