"""Take in a user's own vision transformer, so that closed forms attack the user's own uploads of it.

adopted = adopt(vit, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
upload = adopted.upload({name: parameter.grad for name, parameter in vit.named_parameters()})
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedmjp.config import UpdateKind
from fedmjp.errors import BadInputError, suggestion
from fedmjp.models import names
from fedmjp.models.entrance import channel_values, denormalised, require_pixels
from fedmjp.models.layouts import unwrap_name
from fedmjp.models.probing import EntranceLayout, before_embedding, find_entrance
from fedmjp.records import Upload, require_weights, weights_digest

_REQUIRED = (names.PATCH_WEIGHT, names.POSITION_EMBEDDING)


@dataclass(frozen=True)
class Role:
    """One parameter, by the user's own ``name`` and ``shape``; ``parameter`` is as attacks expect it."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size


@dataclass
class Adopted:
    """A user's own vision transformer as closed forms see it: its entrance, under the names that they use."""

    has_positions: ClassVar = True  # a module without a position embedding is not adopted
    defended: ClassVar = False  # nor has a user's module MJP's unknown embedding

    pixels: tuple[int, int]  # height and width of its pictures
    pixels_known: bool  # False where the module takes other arrangements of as many patches, and says none
    patch_size: int
    prefix_tokens: int
    mean: Tensor  # (3, 1, 1), subtracted from pictures in [0, 1] before they are embedded
    std: Tensor  # (3, 1, 1), what they are divided by then
    roles: Mapping[str, Role]  # by the names of ``fedmjp.models.names``
    # What was found where, in the user's own names; None for what was not found and is not needed.
    parts: Mapping[str, str | None]
    weights: str  # digest of the module's weights
    pixel_order: tuple[int, ...]  # as of ``EntranceLayout``

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by the name that it has in ``fedmjp.models.names``.

        Args:
            target: The name that it has in ``fedmjp.models.names``.
        """
        return self.roles[target].parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter that was recognised, by that name."""
        return ((name, role.parameter) for name, role in self.roles.items())

    def denormalise(self, images: Tensor) -> Tensor:
        """Map images from the network's input space back to [0, 1]; values outside are clipped.

        Args:
            images: (batch, 3, height, width), normalised.
        """
        return denormalised(images, self.mean, self.std)

    def upload(
        self,
        tensors: Mapping[str, Tensor],
        *,
        examples: int = 1,
        kind: UpdateKind = "gradient",
        weights: str | None = None,
    ) -> Upload:
        """Make an upload of what a client sent.

        Args:
            tensors: Gradients or weight changes, by the names of the user's module, with or without what torch's
                wrappers add to them. Those of patch and position embedding must be there; others may be missing.
            examples: Pictures behind it.
            kind: "gradient", or "delta" for weight changes.
            weights: Digest of the weights that it was computed from, where the client states it: its own
                ``adopt(module).weights``.

        Raises:
            BadInputError: If a tensor that closed forms need is missing or not like the module's, or if the client had
                other weights than the module has.
        """
        bare = {unwrap_name(name): tensor for name, tensor in tensors.items()}
        unwrapped = {
            role.name: tensors.get(role.name, bare.get(unwrap_name(role.name))) for role in self.roles.values()
        }
        canonical = {
            name: _in_our_shape(_checked(role, unwrapped[role.name], tensors), name, self.pixel_order, self.patch_size)
            for name, role in self.roles.items()
            if name in _REQUIRED or unwrapped[role.name] is not None
        }
        stated = weights or self.weights
        upload = Upload(canonical, kind, num_examples=examples, server_round=1, node=0, weights=stated)
        require_weights(upload, self.weights)
        return upload


def adopt(
    module: nn.Module,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    pixels: tuple[int, int] | None = None,
) -> Adopted:
    """Find by structure what closed forms read of a vision transformer: of timm, torchvision, transformers or your own.

    The module is not changed. A copy of it is run once on a random picture, to see that what was found is right.

    Args:
        module: Takes normalised pictures (batch, 3, height, width). It may normalise them itself, each channel by one
            factor and summand.
        mean: What the client subtracts from the three channels of pictures in [0, 1]. May be left out for timm's
            models, which say it themselves.
        std: What the client divides them by then.
        pixels: Height and width of its pictures. None takes what the module says. Where it says nothing and takes more
            than one arrangement of as many patches, an attack looks how the recovered patches fit together.

    Raises:
        BadInputError: If patch or position embedding cannot be found, or mean and std are not known; it says what was
            looked for and what to do.
    """
    centre, scale = _statistics(module, mean, std)
    if pixels is not None:
        require_pixels(pixels)
    entrance = find_entrance(module, None if pixels is None else (pixels[0], pixels[1]))
    parameters, embedding = dict(module.named_parameters()), entrance.embedding
    device = parameters[entrance.positions.name].device
    inside_mean, inside_std = before_embedding(entrance, centre, scale)
    in_module = {
        names.PATCH_WEIGHT: f"{embedding.name}.weight",
        names.PATCH_BIAS: f"{embedding.name}.bias",
        names.POSITION_EMBEDDING: entrance.positions.name,
        names.CLASS_TOKEN: entrance.class_token,
        names.HEAD_BIAS: f"{entrance.head}.bias",
    }
    roles = {}
    for name, own_name in in_module.items():
        if own_name is not None and own_name in parameters:
            parameter = parameters[own_name].detach()
            shaped = _in_our_shape(parameter, name, entrance.pixel_order, embedding.patch_size)
            roles[name] = Role(own_name, nn.Parameter(shaped, requires_grad=False), parameter.shape)
    return Adopted(
        pixels=entrance.pixels,
        pixels_known=entrance.pixels_known,
        patch_size=embedding.patch_size,
        prefix_tokens=entrance.prefix_tokens,
        mean=inside_mean.to(device),
        std=inside_std.to(device),
        roles=roles,
        parts=_parts(module, entrance),
        weights=weights_digest(module.state_dict()),
        pixel_order=entrance.pixel_order,
    )


def _statistics(
    module: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[list[float], list[float]]:
    stated: Any = getattr(module, "pretrained_cfg", None)
    if mean is None and std is None and isinstance(stated, Mapping) and "mean" in stated and "std" in stated:
        mean, std = stated["mean"], stated["std"]
    if mean is None or std is None:
        raise BadInputError(
            f"a {type(module).__name__} does not say how pictures are normalised before they enter it: give both mean "
            "and std, such as ImageNet's 0.485,0.456,0.406 and 0.229,0.224,0.225; 0,0,0 and 1,1,1 where they are not"
        )
    return channel_values(mean, std)


def _parts(module: nn.Module, entrance: EntranceLayout) -> dict[str, str | None]:
    repeated = {
        name: len(part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1 and len({type(item) for item in part}) == 1
    }
    return {
        "patch embedding": entrance.embedding.name,
        "position embedding": entrance.positions.name,
        "class token": entrance.class_token,
        "blocks": max(repeated, key=repeated.__getitem__, default=None),
        "head": entrance.head,
    }


def _checked(role: Role, tensor: object, tensors: Mapping[str, Tensor]) -> Tensor:
    if tensor is None:
        raise BadInputError(
            f"the upload has no tensor {role.name!r} {tuple(role.shape)}, which closed forms need: give tensors the "
            f"module's own names; {suggestion(role.name, tensors)}"
        )
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise BadInputError(f"upload tensor {role.name!r} is a {kind}: give a torch tensor of real numbers")
    if tensor.shape != role.shape:
        raise BadInputError(
            f"upload tensor {role.name!r} has shape {tuple(tensor.shape)}, the module's has {tuple(role.shape)}"
        )
    if not torch.isfinite(tensor).all():
        raise BadInputError(f"upload tensor {role.name!r} holds NaN or infinite values: nothing can be solved for")
    return tensor.detach()


def _in_our_shape(tensor: Tensor, name: str, pixel_order: Sequence[int], patch_size: int) -> Tensor:
    if name == names.POSITION_EMBEDDING:
        return tensor.reshape(1, -1, tensor.shape[-1])
    if name == names.PATCH_WEIGHT:
        sides = (3, patch_size, patch_size)
        pixels = tensor.reshape(len(tensor), *(sides[axis] for axis in pixel_order))
        back = sorted(range(3), key=lambda place: pixel_order[place])
        return pixels.permute(0, *(1 + place for place in back)).contiguous()
    return tensor
