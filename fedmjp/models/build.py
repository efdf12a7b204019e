"""Build a model by name from its configuration."""

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import timm
import torch
from torch import Tensor

from fedmjp.config import ModelConfig
from fedmjp.errors import ConfigError
from fedmjp.models.april import AprilBlock
from fedmjp.models.architectures import ARCHITECTURES, Architecture, ArchitectureFamily, Positions, architecture
from fedmjp.models.checkpoints import load_checkpoint
from fedmjp.models.classifier import Classifier, PositionedClassifier, SwinClassifier, VitClassifier
from fedmjp.models.localisation import LocalisationRegressor
from fedmjp.seeds import derive, scoped_randomness

__all__ = [
    "ARCHITECTURES",
    "architecture",
    "blueprint",
    "build",
    "build_vit",
    "parameter_count",
    "with_weights",
]


def build(config: ModelConfig, *, drop_path: float = 0.0) -> Classifier:
    """Build the model with initial weights drawn from ``config.seed``, or those of ``config.weights``.

    The weights that variants of a model share, such as the defended and the undefended one, are the same for the same
    seed.

    Args:
        config: Name, sizes and seed or checkpoint of the model.
        drop_path: Share of the last residual branch's uses that training leaves out, in [0, 1]; less before it.

    Raises:
        UnknownNameError: If there is no such model.
        ConfigError: If the model cannot be defended as asked, or not with these patches.
        CheckpointError: If there are no such weights, or they do not fit.
    """
    design = architecture(config.name)
    with scoped_randomness(derive(config.seed, "weights")):  # timm takes no generator
        model = _drawn(config, design, drop_path)
    if config.weights is not None:
        load_checkpoint(model, config.weights, ignored=design.ignored_weights)
    return model


def build_vit(config: ModelConfig, *, drop_path: float = 0.0) -> VitClassifier:
    """Build a vision transformer, which attacks read, as ``build`` does.

    Args:
        config: Name, sizes and seed or checkpoint of the model.
        drop_path: As of ``build``.

    Raises:
        BadInputError: If the model is none.
    """
    return _as_vit(build(config, drop_path=drop_path), config)


def blueprint(config: ModelConfig) -> VitClassifier:
    """Build the model without weights, on torch's meta device, for questions of shape and applicability.

    Later calls return the same object, because a new one takes a fifth of a second.

    Args:
        config: Name, sizes and seed or checkpoint of the model.
    """
    return _as_vit(_on_meta(config), config)


def parameter_count(config: ModelConfig) -> int:
    """Count the numbers that are trained.

    Args:
        config: Name, sizes and seed or checkpoint of the model.
    """
    return sum(parameter.numel() for parameter in _on_meta(config).parameters())


@lru_cache(maxsize=64)
def _on_meta(config: ModelConfig) -> Classifier:
    design = architecture(config.name)
    with torch.device("meta"):
        return _drawn(config, design)


def _as_vit(model: Classifier, config: ModelConfig) -> VitClassifier:
    if not isinstance(model, VitClassifier):
        raise ConfigError(f"{config.name} is no vision transformer: it can be trained and evaluated, not attacked here")
    return model


def _drawn(config: ModelConfig, design: Architecture, drop_path: float = 0.0) -> Classifier:
    """Draw the model from torch's global generator, on torch's current device."""
    if design.patch_size not in (None, config.patch_size):
        raise ConfigError(
            f"{config.name} has patches of {design.patch_size} pixels, not {config.patch_size}: "
            f"set patch size to {design.patch_size}"
        )
    _check_positions(config, design)
    sizes: dict[str, Any] = {} if design.family is ArchitectureFamily.CONVOLUTIONAL else {"img_size": config.image_size}
    if design.family is ArchitectureFamily.TRANSFORMER:
        sizes["patch_size"] = config.patch_size
    backbone: Any = timm.create_model(
        design.timm_name, num_classes=config.classes, drop_path_rate=drop_path, **sizes, **design.changes
    )
    model = _classifier(backbone, config, design)
    if isinstance(model, PositionedClassifier) and config.localisation != "none":
        # Drawn last: nothing else depends on it.
        kind, dim = config.localisation, int(backbone.embed_dim)
        model.localisation = LocalisationRegressor(kind, dim, layers=config.localisation_layers)
    return model.eval()


def _classifier(backbone: Any, config: ModelConfig, design: Architecture) -> Classifier:
    # All of a backbone was drawn and some is taken away, so that the rest does not depend on the variant.
    if design.positions is Positions.ABSENT:
        backbone.pos_embed = None
    if design.positions is Positions.ZERO:
        torch.nn.init.zeros_(backbone.pos_embed)
    if design.april:
        backbone.blocks[0] = AprilBlock(backbone.blocks[0])
    if design.family is ArchitectureFamily.TRANSFORMER:
        return VitClassifier(backbone, defended=config.unknown_embedding, index_embedding=config.index_embedding)
    if design.family is ArchitectureFamily.SWIN and config.unknown_embedding:
        return SwinClassifier(backbone, index_embedding=config.index_embedding)
    return Classifier(backbone, image_size=config.image_size, patch_size=config.patch_size)


def _check_positions(config: ModelConfig, design: Architecture) -> None:
    needs = {
        "an unknown embedding": config.unknown_embedding,
        "an index embedding": config.index_embedding,
        "localisation": config.localisation != "none",
    }
    need = next((name for name, is_set in needs.items() if is_set), None)
    if need is None:
        return
    if design.family is ArchitectureFamily.CONVOLUTIONAL:
        raise ConfigError(
            f"{config.name} has no position embedding, which {need} needs: a jigsaw shuffles its patches without one"
        )
    if design.family is ArchitectureFamily.SWIN and not config.unknown_embedding:
        raise ConfigError(
            f"{config.name} has an absolute position embedding with an unknown one alone, which {need} needs: "
            "take a defence that adds it, such as mjp"
        )
    if design.positions is not Positions.LEARNED:
        raise ConfigError(f"{config.name} has no learned position embedding, which {need} needs: leave it out")


def with_weights(model: VitClassifier, changed: Mapping[str, Tensor]) -> VitClassifier:
    """Copy a model with some of its weights replaced; without any, return the model itself.

    Args:
        model: Is not changed.
        changed: Tensors by the names of its parameters.
    """
    if not changed:
        return model
    copied = copy.deepcopy(model)
    copied.load_state_dict({**model.state_dict(), **changed})
    return copied
