"""How far a picture's statistics inside a ResNet-50 are from those that its batch norms keep of natural pictures."""

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmjp.errors import AttackNotApplicableError, CheckpointError
from fedmjp.files import require_regular
from fedmjp.models.checkpoints import parse_tensors

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which these networks were trained with
MOCO = "module.encoder_q."  # how MoCo names the network within its checkpoint
HEAD = "fc."  # which no statistics depend on; MoCo's is another one


def batch_norm_prior(file: str, sha256: str | None, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Make the distance of candidates (candidates, batch, 3, size, size) in [0, 1] from a ResNet-50's statistics.

    Over the batch norms of the residual branches and the first one, the mean squared differences of means and of
    variances are summed. As in the official code of MJP, those of the shortcuts are left out.

    Args:
        file: Weights under torchvision's names, or MoCo's checkpoint.
        sha256: The file's digest, as hex.
        device: Where it is computed.

    Raises:
        AttackNotApplicableError: If the file cannot be read, is another one, or does not hold a ResNet-50.
    """
    network = _resnet50(_weights(file, sha256), file).to(device)
    mean, deviation = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, DEVIATION))
    layer_inputs: list[tuple[nn.BatchNorm2d, Tensor]] = []
    for name, part in network.named_modules():
        if isinstance(part, nn.BatchNorm2d) and "downsample" not in name:
            part.register_forward_pre_hook(lambda norm, inputs: layer_inputs.append((norm, inputs[0])))

    def distance(images: Tensor) -> Tensor:
        layer_inputs.clear()
        network(((images - mean) / deviation).flatten(0, 1))
        total = images.new_zeros(len(images))
        for norm, inputs in layer_inputs:
            of_each = inputs.view(len(images), -1, *inputs.shape[1:])
            for statistic, buffer in ((of_each.mean, "running_mean"), (of_each.var, "running_var")):
                total = total + (statistic(dim=(1, 3, 4)) - norm.get_buffer(buffer)).square().mean(dim=1)
        layer_inputs.clear()
        return total

    return distance


def file_refusal(file: str, sha256: str | None) -> str | None:
    """Say why a file is not the one that the options name.

    Args:
        file: Its path.
        sha256: The digest that the options state.

    Returns:
        The refusal; None if the file is the right one.
    """
    try:
        require_regular(Path(file))
        digest = _digest(file, Path(file).stat().st_mtime_ns)
    except OSError as error:
        return f"batch_norm: {file} cannot be read: {error.strerror}"
    if digest == sha256:
        return None
    demand = "batch_norm_sha256 must say which file is meant" if sha256 is None else f"batch_norm_sha256 is {sha256}"
    return f"batch_norm: {file} has SHA-256 {digest}; {demand}"


@lru_cache(maxsize=8)
def _digest(file: str, _changed: int) -> str:
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _weights(file: str, sha256: str | None) -> Mapping[str, Any]:
    """Load the file's tensors under torchvision's names."""
    if refusal := file_refusal(file, sha256):
        raise AttackNotApplicableError(refusal)
    try:
        loaded = parse_tensors(Path(file).read_bytes(), Path(file))
    except CheckpointError as error:
        raise AttackNotApplicableError(f"batch_norm: {error}") from None
    loaded = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else {}
    of_moco = {name.removeprefix(MOCO): value for name, value in loaded.items() if str(name).startswith(MOCO)}
    return of_moco or loaded


def _resnet50(weights: Mapping[str, Any], file: str) -> nn.Module:
    """Build the network in evaluation mode with these weights, without its head."""
    from torchvision.models import resnet50  # noqa: PLC0415 (for who gives weights alone)

    with torch.device("meta"):
        network: nn.Module = resnet50(weights=None)
    shapes = {name: value.shape for name, value in network.state_dict().items() if not name.startswith(HEAD)}
    wrong = [name for name, shape in shapes.items() if getattr(weights.get(name), "shape", None) != shape]
    if wrong:
        raise AttackNotApplicableError(
            f"batch_norm: {file} holds no ResNet-50: {wrong[0]} is missing or of another shape; take torchvision's "
            "weights or a checkpoint of MoCo's"
        )
    network.fc = nn.Identity()
    network.load_state_dict({name: weights[name] for name in shapes}, assign=True)
    return network.requires_grad_(requires_grad=False).eval()
