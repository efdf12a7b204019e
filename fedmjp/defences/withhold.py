"""Keep some tensors at the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import Client, Defence
from fedmjp.errors import DefenceError
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["patch_embedding", "position_embedding", "head", "body"]


def _split(value: object) -> object:
    """Split names joined by plus signs, as the command line takes them, into a tuple."""
    return tuple(part.strip() for part in value.split("+")) if isinstance(value, str) else value


def _leave_something(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    if not roles or len(set(roles)) < len(roles):
        raise ValueError("name at least one role, each once")
    if {"head", "body"} <= set(roles):
        raise ValueError("body is everything but the head: with both, nothing would leave")
    return roles


class WithholdOptions(Config):
    """Options of what is withheld."""

    roles: Annotated[tuple[Role, ...], BeforeValidator(_split), AfterValidator(_leave_something)] = Field(
        ("patch_embedding", "position_embedding"),
        description="patch_embedding, position_embedding, head, body (all but the head); several joined by +",
    )


class Withhold(Defence):
    """Tensors with certain roles stay at the client; in training they are frozen.

    Example:
        >>> roles = {"head": frozenset({"head.weight"}), "body": frozenset({"blocks.0.weight"})}
        >>> sorted(Withhold({"roles": "head"}).withheld(roles))
        ['head.weight']
    """

    name = "withhold"
    paper = "as of the position embedding in Lu et al., APRIL, CVPR 2022"
    summary = "some tensors (patch embedding, position embedding, head, all but the head) never leave"
    told = "which tensors do not leave"
    stages = ("update",)
    marks: ClassVar = frozenset({"withheld"})
    draws = False
    options_type = WithholdOptions

    @override
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        withheld = self.withheld(client.roles)
        return {name: tensor for name, tensor in update.items() if name not in withheld}

    def withheld(self, roles: Mapping[str, frozenset[str]]) -> frozenset[str]:
        """Name the tensors that never leave; arguments as for ``Defence.withheld``.

        Raises:
            DefenceError: If a role has no tensors in this model, or nothing would leave.
        """
        for role in self.options.roles:
            if not roles.get(role):
                raise DefenceError(f"{self.name}: the model has no tensors with the role {role}; name other roles")
        names = frozenset().union(*(roles[role] for role in self.options.roles))
        if names >= frozenset().union(*roles.values()):
            raise DefenceError(f"{self.name}: roles {'+'.join(self.options.roles)} are all that there is to upload")
        return names
