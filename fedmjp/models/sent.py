"""What attacks read of a model of which the weights alone are known, as they crossed the wire: no module, no code."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from fedmjp.config import UpdateKind
from fedmjp.errors import BadInputError
from fedmjp.models import names
from fedmjp.models.entrance import denormalised
from fedmjp.models.probing import MOST_PREFIX_TOKENS
from fedmjp.models.roles import roles_of_tensors
from fedmjp.records import Upload


@dataclass
class SentWeights:
    """Weights by role, as far as names and shapes tell: an ``Entrance``, and the head with the norm before it.

    Roles are likely, not checked: an attack's own certificate says whether they were right. Sizes are 0 where there is
    no patch embedding of square patches, as in networks without patches.
    """

    in_message: Mapping[str, str]  # a name of ``fedmjp.models.names`` to that in the message
    parameters: Mapping[str, nn.Parameter]  # by the names of ``fedmjp.models.names``
    image_size: int = 0
    patch_size: int = 0
    prefix_tokens: int = 0
    defended: bool = False
    weights: str = ""  # no digest: uploads come from the same message
    mean: Tensor = field(default_factory=lambda: torch.zeros(3, 1, 1))
    std: Tensor = field(default_factory=lambda: torch.ones(3, 1, 1))

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Self:
        """Find roles in weights; names without meaning ("0", "1", ...) are enough.

        Args:
            weights: As the server sent them, in the model's order.
        """
        in_message = _roles(weights)
        shapes = {name: weights[sent_name].shape for name, sent_name in in_message.items()}
        parameters = {
            name: nn.Parameter(weights[sent_name].detach(), requires_grad=False)
            for name, sent_name in in_message.items()
            if weights[sent_name].is_floating_point()
        }
        image_size, patch_size, prefix_tokens = _sizes(shapes)
        if names.POSITION_EMBEDDING in parameters:
            rows = parameters[names.POSITION_EMBEDDING]
            parameters[names.POSITION_EMBEDDING] = nn.Parameter(rows.reshape(1, -1, rows.shape[-1]), False)
        return cls(in_message, parameters, image_size, patch_size, prefix_tokens)

    @property
    def has_positions(self) -> bool:
        """Tell whether there is a position embedding, and patches that it is of."""
        return self.image_size > 0 and names.POSITION_EMBEDDING in self.parameters

    @property
    def pixels(self) -> tuple[int, int]:
        """Return height and width of its pictures, which are taken for squares."""
        return self.image_size, self.image_size

    @property
    def grid(self) -> int:
        """Count the patches per side."""
        return self.image_size // self.patch_size if self.patch_size else 0

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by the name that it has in ``fedmjp.models.names``.

        Args:
            target: The name that it has in ``fedmjp.models.names``.
        """
        return self.parameters[target]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter whose role is known, by that name."""
        return iter(self.parameters.items())

    def denormalise(self, images: Tensor) -> Tensor:
        """Map images from the network's input space back to [0, 1]; values outside are clipped.

        Args:
            images: (batch, 3, size, size), normalised.
        """
        return denormalised(images, self.mean, self.std)

    def upload(self, update: Mapping[str, Tensor], *, examples: int, kind: UpdateKind) -> Upload:
        """Turn what crossed the wire into an upload, as attacks take it.

        Args:
            update: Tensors by the names of the message.
            examples: Pictures behind it.
            kind: "gradient", or "delta" for weight changes.

        Raises:
            BadInputError: If nothing in it has a role.
        """
        present = {
            name: sent_name
            for name, sent_name in self.in_message.items()
            if sent_name in update and name in self.parameters
        }
        if not present:
            raise BadInputError("nothing in the update has a role that attacks know")
        tensors = {name: update[sent_name].reshape(self.parameters[name].shape) for name, sent_name in present.items()}
        return Upload(tensors, kind, num_examples=examples, server_round=1, node=0, weights=self.weights)


def _roles(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the names of ``fedmjp.models.names`` to those in the message."""
    roles = roles_of_tensors(weights)
    pairs = {
        (names.PATCH_WEIGHT, names.PATCH_BIAS): roles["patch_embedding"],
        (names.HEAD_WEIGHT, names.HEAD_BIAS): roles["head"],
    }
    names_in_message: dict[str, str] = {}
    for (weight, bias), members in pairs.items():
        for name in members:
            names_in_message[bias if weights[name].ndim == 1 else weight] = name
    positions = roles["position_embedding"] - {names.UNKNOWN_EMBEDDING}
    if len(positions) == 1:
        names_in_message[names.POSITION_EMBEDDING] = next(iter(positions))
    if names.HEAD_WEIGHT in names_in_message:
        # A LayerNorm right before the head is two vectors as long as the head's rows.
        order, head = list(weights), names_in_message[names.HEAD_WEIGHT]
        vectors = order[max(0, order.index(head) - 2) : order.index(head)]
        if [weights[name].shape for name in vectors] == 2 * [weights[head].shape[1:]]:
            names_in_message |= {names.NORM_WEIGHT: vectors[0], names.NORM_BIAS: vectors[1]}
    return names_in_message


def _sizes(shapes: Mapping[str, torch.Size]) -> tuple[int, int, int]:
    """Return sizes of picture and patch, and the prefix tokens; zeros where patch and position embedding do not fit."""
    patches, rows = shapes.get(names.PATCH_WEIGHT), shapes.get(names.POSITION_EMBEDDING)
    if patches is None or rows is None or patches[2] != patches[3]:
        return 0, 0, 0
    tokens = rows[-2]
    grid = math.isqrt(tokens)
    if grid < 2 or tokens - grid**2 > MOST_PREFIX_TOKENS:
        return 0, 0, 0
    return grid * patches[2], patches[2], tokens - grid**2
