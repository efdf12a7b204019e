"""The contract of a defence: a change that a client makes before anything leaves it.

A defence acts at one or several *stages* of a client's work, and only the hooks of these are called. One object serves
campaigns, training and Flower mods. Its hooks are pure: they change nothing that they are given, and draw nothing but
from the randomness that they are given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from fedmjp.config import Config, ModelConfig, UpdateKind
from fedmjp.errors import DefenceError
from fedmjp.randomness import Randomness
from fedmjp.tensors import is_finite

if TYPE_CHECKING:
    from torch import Tensor, nn

Stage = Literal["pictures", "model", "examples", "update", "aggregate"]
# The part that must be seen at once: with "tensor", a part of an update is protected as the whole is.
Scope = Literal["tensor", "update", "example"]
# Traces that a defence leaves on an upload, for attacks to take into account or to be blind to.
Mark = Literal[
    "shuffled",  # patches of the picture changed places
    "masked",  # the position embedding of some patches was replaced
    "noisy",  # noise was added; ``noise_on`` says how much
    "rounded",  # entries are off by a share of their size; ``rounding`` says how much
    "pruned",  # entries that were not zero are zero
    "scaled",  # the whole update was multiplied by a factor that the server is not told
    "signs",  # magnitudes are gone
    "withheld",  # some tensors are not in the upload
    "summed",  # the upload is of several clients together
    "reshaped",  # something else was done to it
]
Relation = Literal["replace-one", "add-or-remove-one"]
FULL_BITS = 32.0  # of a float32 value


@dataclass(frozen=True)
class Client:
    """Knowledge of a client that protects an update; a mod sees neither model nor pictures."""

    kind: UpdateKind
    # Structural role ("patch_embedding", "position_embedding", "head") to names of tensors.
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict)
    examples: int = 1  # pictures behind the update
    model: nn.Module | None = None  # with the weights that the server had sent
    images: Tensor | None = None  # (batch, 3, size, size) in [0, 1] as they went into the network
    mask: Tensor | None = None  # (batch, patches) bool as it went into the network; None without one


@dataclass(frozen=True)
class Spent:
    """Differential privacy that so many uploads have cost one client."""

    epsilon: float
    delta: float
    relation: Relation  # what two data sets differ in, of which an observer cannot tell which was used
    unit: Literal["client", "picture"]  # what is protected: a client's whole share, or a single picture
    uploads: int


@dataclass(frozen=True)
class Plan:
    """Numbers of a run that are known before it begins.

    Options of defences that have the names of these fields, and that nobody gave, are taken from here: the guarantee is
    then for the rounds of the run.
    """

    rounds: int  # uploads of the client that makes most
    steps: int  # of the optimiser of a client, in all rounds
    steps_per_upload: int  # of them behind one upload
    batch_size: int  # pictures of a step, at most


Drawn = tuple["Tensor", "Tensor"]  # mask and source of some pictures, as of ``Arranged``


@dataclass(frozen=True)
class Arranged:
    """Pictures as they go into the network."""

    images: Tensor  # (batch, 3, size, size) in [0, 1]
    mask: Tensor  # (batch, patches) bool on the CPU, True where a patch changed places or lost its position
    source: Tensor  # (batch, patches) int64 on the CPU; place i shows patch ``source[i]`` of the picture before


def unmoved(images: Tensor, grid: int) -> Arranged:
    """Arrange pictures as they are: no patch is masked or moved.

    Args:
        images: (batch, 3, size, size) in [0, 1].
        grid: Patches per side.
    """
    import torch

    places = torch.arange(grid**2).expand(len(images), -1)
    return Arranged(images, torch.zeros_like(places, dtype=torch.bool), places)


class Defence(ABC):
    """Base of all defences.

    Class attributes state what `fedmjp list defences NAME` prints and how a pipeline calls it:

    - ``name``; ``paper``, the source; ``summary``, one line; ``told``, what of it an honest-but-curious server
      is told;
    - ``stages``, where it acts; ``scope``, what it must see at once;
    - ``marks``, what it leaves on an upload;
    - ``draws``: whether two uploads of one picture at the same weights may differ by what it drew;
    - ``needs_model``: whether it computes with the model and the pictures, which a mod does not see;
    - ``options_type``: the configuration model of its options, given as by ``NAME:key=value``; ``Config`` has none.

    Raises:
        ConfigError: On an unknown option or a value out of range.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    told: ClassVar[str]
    stages: ClassVar[tuple[Stage, ...]]
    scope: ClassVar[Scope] = "tensor"
    marks: ClassVar[frozenset[Mark]] = frozenset()
    draws: ClassVar[bool] = True
    needs_model: ClassVar[bool] = False
    options_type: ClassVar[type[Config]] = Config

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = self.options_type.parse(options or {})

    # Stage "pictures".
    @property
    def mask_ratio(self) -> float:
        """Return the share of the patches that it aims to move or mask; 0 if it does neither."""
        return 0.0

    @property
    def shuffles(self) -> bool:
        """Tell whether it moves patches."""
        return False

    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
        """Change pictures before they go into the network.

        Args:
            images: (batch, 3, size, size) in [0, 1].
            grid: Patches per side.
            randomness: A source for each picture.
        """
        del randomness
        return unmoved(images, grid)

    def ahead(self, grid: int, *, randomness: Sequence[Randomness]) -> Drawn | None:
        """Draw what ``arrange`` would, before the pictures are there; None if it cannot, which is the default.

        Args:
            grid: Patches per side.
            randomness: A source for each picture.
        """
        del grid, randomness
        return None

    def shown(self, images: Tensor, drawn: Drawn) -> Arranged:
        """Arrange pictures as ``arrange`` would, with what ``ahead`` drew for them.

        Args:
            images: (batch, 3, size, size) in [0, 1].
            drawn: Mask and source of these pictures.
        """
        raise NotImplementedError

    # Stage "model".
    def change_model(self, model: ModelConfig) -> ModelConfig:
        """Change the network that the client trains.

        Args:
            model: Without this defence.
        """
        return model

    # Stage "examples".
    def protect_examples(self, gradients: Mapping[str, Tensor], *, randomness: Randomness) -> dict[str, Tensor]:
        """Combine the gradients of single pictures to that of the step; by default their mean.

        Args:
            gradients: (batch, *shape) by name.
            randomness: Source of all that is drawn.
        """
        del randomness
        return {name: gradient.mean(dim=0) for name, gradient in gradients.items()}

    # Stage "update".
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        """Change an update before it leaves the client.

        Args:
            update: Tensors by name, finite; all of the update where ``scope`` is "update".
            client: What the client knows besides.
            randomness: Source of all that is drawn.

        Returns:
            Tensors of the same shapes and types. Names may be missing: what is withheld.

        Raises:
            DefenceError: If it cannot protect this update, which then must not leave the client.
        """
        del client, randomness
        return dict(update)

    def withheld(self, roles: Mapping[str, frozenset[str]]) -> frozenset[str]:
        """Name the tensors that never leave the client.

        Args:
            roles: Names of a model's tensors, by structural role.
        """
        del roles
        return frozenset()

    # Stage "aggregate".
    @property
    def clients(self) -> int:
        """Count the clients whose updates the server sees as one."""
        return 1

    # For attackers to take into account.
    @property
    def rounding(self) -> float:
        """Return the largest relative error that it leaves in an entry."""
        return 0.0

    def noise_on(self, uploaded: Tensor) -> float:
        """Estimate the standard deviation of its noise on the entries of an uploaded tensor.

        Args:
            uploaded: As it arrived, of any shape.
        """
        del uploaded
        return 0.0

    # Its cost.
    def spent(self, uploads: int) -> Spent | None:
        """Compute the privacy that the uploads of one client cost; None without a guarantee.

        Args:
            uploads: How many, from 0.
        """
        del uploads
        return None

    def bits(self, incoming: float) -> float:
        """Compute the bits per value that an encoder needs after this defence.

        Args:
            incoming: Bits per value before it; 32 without any defence.
        """
        return incoming

    # Its place in a pipeline.
    def refusal(self, earlier: Sequence[Defence]) -> str | None:
        """Say why it cannot follow other defences; None if it can.

        Args:
            earlier: The defences that act before it, in order.
        """
        del earlier
        return None


class TensorDefence(Defence):
    """Base of defences that change each tensor of real numbers by itself; counters and the like pass untouched."""

    stages = ("update",)

    @override
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        require_finite(update, self.name)
        return {
            name: self.change(name, tensor, randomness) if tensor.is_floating_point() and tensor.numel() else tensor
            for name, tensor in update.items()
        }

    @abstractmethod
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        """Change one tensor of an update.

        Args:
            name: Of the tensor.
            tensor: Finite real numbers, of any shape but empty.
            randomness: Source of all that is drawn.
        """


def require_finite(update: Mapping[str, Tensor], defence: str) -> None:
    """Refuse an update with NaN or infinite values: no guarantee holds for numbers that are none.

    Args:
        update: Tensors by name.
        defence: Name of who refuses, for the message.

    Raises:
        DefenceError: If a tensor of real numbers is not finite.
    """
    for name, tensor in update.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise DefenceError(f"{defence}: tensor {name!r} holds NaN or infinite values; the update does not leave")
