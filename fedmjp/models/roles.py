"""What a model's tensors are, by their place in the structure."""

from collections.abc import Mapping

from torch import nn

from fedmjp.models import names


def roles_of(model: nn.Module) -> Mapping[str, frozenset[str]]:
    """Structural role ("patch_embedding", "position_embedding", "head") to names of parameters."""
    known = [name for name, _ in model.named_parameters()]
    positions = {names.POSITION_EMBEDDING, names.UNKNOWN_EMBEDDING, "index_embedding"}
    return {
        "patch_embedding": frozenset(name for name in known if name in (names.PATCH_WEIGHT, names.PATCH_BIAS)),
        "position_embedding": frozenset(name for name in known if name in positions),
        "head": frozenset(name for name in known if name.startswith("backbone.head.")),
    }
