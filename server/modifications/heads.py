"""What servers that change the head of a model have in common."""

import math

import torch
from torch import Tensor

from attacks.adamw import EPSILON
from fedmjp.arithmetic import computing
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.roles import roles_of
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

# Of tokens. An eighth gave 10 dB more than the tokens as they are, a 32nd less on DeiT-S: LayerNorm's epsilon shows.
SMALLER = 1 / 8
NEEDED = (names.NORM_WEIGHT, names.NORM_BIAS, names.HEAD_WEIGHT, names.HEAD_BIAS)


def head_refusal(server: str, model: VitClassifier, scenario: Scenario) -> str | None:
    """Say why a server cannot change the head of a scenario's model; None if it can."""
    known = {name for name, _ in model.named_parameters()}
    if missing := [name for name in NEEDED if name not in known]:
        return f"{server}: changes the model's head, but the model has no tensor {missing[0]}"
    for defence in scenario.pipeline.made:
        if defence.withheld(roles_of(model)) & set(NEEDED):
            return f"{server}: changes the head, which {defence.name} keeps at the client"
    if scenario.local_optimiser == "adamw" and scenario.pipeline.clients > 1:
        return f"{server}: steps of AdamW that are summed do not come apart: every client's would have to be read alone"
    return None


def without_sum(threat: ThreatModel) -> ThreatModel:
    """The threat model of one client's update, where the server takes it out of a sum."""
    kept = threat.pipeline.of_stage("pictures", "model", "examples", "update")
    return threat.model_copy(update={"defences": kept.configs})


def faintness(model: VitClassifier, row: Tensor, threat: ThreatModel) -> float:
    """The factor of a head's row at which a step of AdamW shows the gradients of the embeddings well.

    These are then about AdamW's epsilon for a picture of noise, of which the server knows all: how large they are
    depends on the weights far more than on the picture.
    """
    size = model.image_size
    noise = torch.rand(1, 3, size, size, generator=torch_generator(0, "faintness")).to(row)
    mask = torch.zeros(1, model.grid**2, dtype=torch.bool, device=row.device) if model.defended else None
    read = [model.get_parameter(name) for name in (names.POSITION_EMBEDDING, names.PATCH_WEIGHT)]
    with computing("float32", row.device), torch.enable_grad():
        gradients = torch.autograd.grad((model.features(noise, mask) @ row).sum(), read)
    sizes = [float(gradient.square().mean().sqrt()) for gradient in gradients]
    return EPSILON * threat.pictures / math.sqrt(math.prod(sizes))


def small_tokens(model: VitClassifier) -> dict[str, Tensor]:
    """All that makes tokens, smaller: a step of AdamW is then larger beside the rounding of these weights.

    The LayerNorm before the first block makes tokens large again, and gradients at them are the larger.
    """
    known = dict(model.named_parameters())
    made = (
        names.PATCH_WEIGHT, names.PATCH_BIAS, names.CLASS_TOKEN, names.POSITION_EMBEDDING, names.UNKNOWN_EMBEDDING,
    )  # fmt: skip
    return {name: SMALLER * known[name].detach() for name in made if name in known}
