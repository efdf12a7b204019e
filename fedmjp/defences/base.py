"""The contract of a defence: what a client changes before anything leaves it.

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
from fedmjp.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

Stage = Literal["pictures", "model", "examples", "update", "aggregate"]
# What must be seen at once: with "tensor", a part of an update is protected as the whole is.
Scope = Literal["tensor", "update", "example"]
# What a defence leaves on an upload, for attacks to take into account or to be blind to.
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
    """What a client knows when it protects an update; a mod sees neither model nor pictures."""

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
    """What is known of a run before it begins.

    Options that are called as these fields, and that nobody gave, are taken from here: a guarantee that is for the
    rounds of the run is then the one that was asked for.
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
        """Wanted share of the patches that it moves or masks; 0 if it does neither."""
        return 0.0

    @property
    def shuffles(self) -> bool:
        """Whether it moves patches."""
        return False

    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
        """Pictures (batch, 3, size, size) in [0, 1] as they go into the network, with a source of randomness each."""
        del randomness
        places = torch.arange(grid**2).expand(len(images), -1)
        return Arranged(images, torch.zeros_like(places, dtype=torch.bool), places)

    def ahead(self, grid: int, *, randomness: Sequence[Randomness]) -> Drawn | None:
        """What ``arrange`` draws, for ``shown``; None, as by default, if it draws with the pictures at hand."""
        del grid, randomness
        return None

    def shown(self, images: Tensor, drawn: Drawn) -> Arranged:
        """What ``arrange`` makes of pictures with what ``ahead`` gave for them."""
        raise NotImplementedError

    # Stage "model".
    def change_model(self, model: ModelConfig) -> ModelConfig:
        """The network that the client trains in place of ``model``."""
        return model

    # Stage "examples".
    def protect_examples(self, gradients: Mapping[str, Tensor], *, randomness: Randomness) -> dict[str, Tensor]:
        """From the gradients of single pictures, (batch, *shape) by name, to that of the step."""
        del randomness
        return {name: gradient.mean(dim=0) for name, gradient in gradients.items()}

    # Stage "update".
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        """An update as it leaves the client.

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
        """Names of tensors that never leave, by the roles of a model's tensors."""
        del roles
        return frozenset()

    # Stage "aggregate".
    @property
    def clients(self) -> int:
        """How many clients' updates the server sees as one."""
        return 1

    # What an attacker may take into account.
    @property
    def rounding(self) -> float:
        """Largest relative error that it leaves in an entry."""
        return 0.0

    def noise_on(self, uploaded: Tensor) -> float:
        """Standard deviation of the noise on the entries of an uploaded tensor."""
        del uploaded
        return 0.0

    # What it costs.
    def spent(self, uploads: int) -> Spent | None:
        """Privacy that so many uploads of one client cost; None without a guarantee."""
        del uploads
        return None

    def bits(self, before: float) -> float:
        """Bits per value that an encoder needs after it, of so many before; 32 without any defence."""
        return before

    # What may stand before and after it.
    def refusal(self, before: Sequence[Defence]) -> str | None:
        """Why it cannot follow these defences; None if it can."""
        del before
        return None


class TensorDefence(Defence):
    """Changes each tensor of real numbers, whatever else is in the update; counters and the like pass untouched."""

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
        """What becomes of a tensor of finite real numbers, not empty, of any shape."""


def require_finite(update: Mapping[str, Tensor], defence: str) -> None:
    """DefenceError if a tensor holds NaN or infinite values: no guarantee holds for numbers that are none."""
    for name, tensor in update.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise DefenceError(f"{defence}: tensor {name!r} holds NaN or infinite values; the update does not leave")
