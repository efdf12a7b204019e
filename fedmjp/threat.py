"""The attacker: what a server sees and knows, and the contract of servers that change weights.

Servers that change weights are for measuring one's own deployment. Ours are in ``fedmjp.server.modifications``; other
packages add theirs through the entry-point group ``fedmjp.servers``: the name, and ``module:class``.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from fedmjp.arithmetic import ROUNDING
from fedmjp.config import Config, LocalOptimiser
from fedmjp.defences.base import Mark
from fedmjp.defences.pipeline import Defences, Pipeline, pipeline_of
from fedmjp.named import NamedConfig
from fedmjp.registry import Registry
from fedmjp.step import ClientStep

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier
    from fedmjp.models.entrance import Entrance
    from fedmjp.records import Upload

FLOAT32 = ROUNDING["float32"]
OPTIMISERS: Mapping[LocalOptimiser, str] = {"sgd": "SGD", "adamw": "AdamW"}  # as sentences have them
HONEST = "honest"  # how a server that changes nothing is called
SCOPE = "Servers that change weights are for measuring your own deployment, in federations started here alone."


class Modification(ABC):
    """A server that changes weights: what it sends, and what its uploads then show.

    Class attributes state what `fedmjp list servers NAME` prints: ``name``; ``paper``, the source; ``summary``, one
    line; ``options_type``, the configuration model of its options, given as by ``NAME:key=value``.

    It is pure: it changes nothing that it is given, and the same input gives the same weights, to the last bit. It
    knows no private data, only what an attacker knows.

    Raises:
        ConfigError: On an unknown option or a value out of range.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    options_type: ClassVar[type[Config]] = Config

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = self.options_type.parse(options or {})

    @property
    def probes(self) -> int:
        """Count the rounds of every batch that come first, from which it learns about the pictures."""
        return 0

    @abstractmethod
    def refusal(self, model: VitClassifier, threat: ThreatModel, *, trains: bool) -> str | None:
        """Say why it cannot be played; None if it can.

        Args:
            model: The clients' model; it may be without weights.
            threat: What the server sees.
            trains: Whether clients train together, so that a client shows another batch in every round.
        """

    def probe(self, model: VitClassifier, threat: ThreatModel) -> Mapping[str, Tensor]:
        """Make the tensors that all clients get in place of the honest ones in a probing round.

        Args:
            model: With honest weights.
            threat: What the server sees.
        """
        del model, threat
        return {}

    def learn(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> object:
        """Read the answer to a probe, for ``weights`` to make use of.

        Args:
            upload: Of a probing round.
            model: With honest weights.
            threat: What the server sees.
        """
        del upload, model, threat
        return None

    @abstractmethod
    def weights(self, model: VitClassifier, threat: ThreatModel, learnt: object) -> Sequence[Mapping[str, Tensor]]:
        """Make the tensors that each client behind one upload gets in place of the honest ones, in their order.

        Args:
            model: With honest weights.
            threat: What the server sees.
            learnt: From the last probe of the same clients and batch; None if there was none.

        Returns:
            By client, the tensors that differ from the model's. Clients that get the same may share an object.
        """

    @abstractmethod
    def view(self, threat: ThreatModel) -> ThreatModel:
        """Describe an isolated upload to the attack that is given it.

        Args:
            threat: What the server sees of whole uploads.
        """

    @abstractmethod
    def isolate(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> Upload:
        """Separate the part of an upload that the changed weights show, as ``view`` describes it.

        Args:
            upload: Computed with the changed weights.
            model: With the changed weights.
            threat: What the server sees of whole uploads.

        Raises:
            AttackFailedError: If the model holds no such weights.
        """

    def reads(self, model: VitClassifier, threat: ThreatModel) -> Sequence[str]:
        """Name the tensors that ``isolate`` reads, besides those that an attack does.

        Args:
            model: The clients' model.
            threat: What the server sees.
        """
        del model, threat
        return ()

    def mixed(self, model: Entrance) -> frozenset[str]:
        """Name the tensors that stay a sum over all pictures: isolated uploads are without them.

        Args:
            model: The clients' model.
        """
        del model
        return frozenset()

    def wanted(self, labels: Sequence[int], threat: ThreatModel) -> list[int]:
        """Tell the evaluator which pictures behind one upload the server is after, as their places.

        Args:
            labels: Of all these pictures.
            threat: What the server sees.
        """
        del threat
        return list(range(len(labels)))


SERVERS: Registry[type[Modification]] = Registry(
    "server",
    {
        "class_fishing": "fedmjp.server.modifications.class_fishing:ClassFishing",
        "concentrator": "fedmjp.server.modifications.concentrator:Concentrator",
        "feature_fishing": "fedmjp.server.modifications.feature_fishing:FeatureFishing",
        "suppression": "fedmjp.server.modifications.suppression:Suppression",
        "token_imprint": "fedmjp.server.modifications.token_imprint:TokenImprintServer",
    },
    entry_points="fedmjp.servers",
)


class ServerConfig(NamedConfig[Modification]):
    """A server by name, with its options beside the name: ``{name: class_fishing, class: 3}``.

    Text is ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``, as the command line takes it.
    """

    registry = SERVERS

    __hash__ = NamedConfig.__hash__


def _read_honest(value: object) -> object:
    return None if value in (HONEST, "") else value


# Records and digests state a server only where it changes weights.
Server = Annotated[ServerConfig | None, BeforeValidator(_read_honest), Field(exclude_if=operator.not_)]


class ThreatModel(ClientStep):
    """An honest-but-curious server, and what reaches it: its read-only view of a scenario.

    It follows the protocol, keeps the weights that it sent, and reads each upload. It set the recipe of the local
    training, so it knows steps, learning rate, label smoothing, mixup and that crops are taken, not what is drawn. With
    ``server`` it is malicious in one thing: it changes weights before it sends them. Each of ``defences`` states
    what the server is told of it. It never holds a picture of the client, the mask, the permutation, or the evaluator's
    records.
    """

    name: str = "Honest-but-curious server"
    labels_known: bool = Field(False, description="is told the labels, in no particular order")
    uploads_per_picture: int = Field(1, ge=1, description="of the same client, under masks drawn independently")
    defences: Defences = Field((), description="what clients do to updates before they leave")
    server: Server = Field(None, description="how it changes the weights that it sends; by default it does not")

    @model_validator(mode="after")
    def _require_possible_order(self) -> ThreatModel:
        self.pipeline  # noqa: B018 (an impossible order is refused here)
        return self

    def digest(self, exclude: Mapping[str, Any] | None = None) -> str:
        """Compute the SHA-256 of what differs from the plain protocol, as hex: ids outlive options that came later.

        Args:
            exclude: Fields to leave out, as pydantic takes them.
        """
        fields = type(self).model_fields
        plain = {
            name: True
            for name in ("uploads_per_picture", "label_smoothing", "defences")
            if getattr(self, name) == fields[name].default
        }
        return super().digest({**plain, **(exclude or {})})

    @property
    def pipeline(self) -> Pipeline:
        """Return the defences themselves, in order."""
        return pipeline_of(self.defences)

    @property
    def marks(self) -> frozenset[Mark]:
        """Collect what was done to uploads, as an attack may take it into account."""
        return self.pipeline.marks

    @property
    def pictures(self) -> int:
        """Count the pictures behind one upload."""
        return self.batch_size * self.pipeline.clients

    @property
    def rounding(self) -> float:
        """Return the largest relative error that is left in a number."""
        return max(ROUNDING[self.arithmetic], self.pipeline.rounding)

    def noise_on(self, uploaded: Tensor) -> float:
        """Return the standard deviation of the noise on the entries of an uploaded tensor.

        Args:
            uploaded: As it arrived, of any shape.
        """
        return self.pipeline.noise_on(uploaded)

    @property
    def gradients_in_delta(self) -> float:
        """Count the gradients that add up, times the learning rate, to SGD's delta: momentum repeats early ones.

        Where each step is on some of the pictures, count the gradients of a mean over the steps.
        """
        return sum(self.unrolled.shares)

    @property
    def undefended(self) -> ThreatModel:
        """Return the same server where clients do nothing to their updates."""
        return self.model_copy(update={"defences": ()})

    @property
    def isolated(self) -> ThreatModel:
        """Return the view that an attack gets: of the isolated part where a server changes weights, else of all."""
        return self if self.server is None else self.server.build().view(self)

    def sentence(self, pipelines: Iterable[Pipeline] = ()) -> str:
        """Put the threat model into words, to print beside results, with what the server is told of each defence.

        Args:
            pipelines: All defences of the scenarios that it is the view of; the server is also told something of those
                that act before an update is made.
        """
        knowledge = "the labels but no masks" if self.labels_known else "neither labels nor masks"
        if self.crop_scale:
            knowledge += " or crops" if self.labels_known else " nor crops"
        undergone = f" It is told that uploads underwent {self.pipeline.label}." if self.defences else ""
        stated = {
            defence.name: defence.told for pipeline in (self.pipeline, *pipelines) for defence in pipeline.defences
        }
        of_each = "".join(f" Of {name} it is told {fact}." for name, fact in stated.items())
        sends, scope, name = "nothing malicious", "", self.name
        if self.server is not None:
            sends = f"weights of its own making ({self.server.text}: {self.server.build().summary})"
            scope, name = f" {SCOPE}", "Malicious server"
        return (
            f"{name}: knows the model and its weights, sees {self._upload_in_words()}, is told {knowledge}, sends "
            f"{sends}.{undergone}{of_each}{scope}"
        )

    def _upload_in_words(self) -> str:
        clients = self.pipeline.clients
        sees = "each client's own" if clients == 1 else f"only the sum of {clients} clients'"
        kind = "FedSGD gradient"
        if self.update == "delta":
            steps = "step" if self.local_steps == 1 else "steps"
            recipe = f"learning rate {self.local_learning_rate:g}"
            recipe += f", momentum {self.local_momentum:g}" if self.local_momentum else ""
            recipe += f", weight decay {self.local_weight_decay:g}" if self.local_weight_decay else ""
            recipe += f", batches of {self.local_batch_size}" if self.local_batch_size else ""
            kind = f"weight delta after {self.local_steps} {OPTIMISERS[self.local_optimiser]} {steps} ({recipe})"
        kind += f" of {self.batch_size} {'picture' if self.batch_size == 1 else 'pictures'}"
        if self.label_smoothing:
            kind += f" under label smoothing {self.label_smoothing:g}"
        if self.arithmetic != "float32":
            kind += f" computed in {self.arithmetic}"
        if self.mixup:
            kind += f" that the client mixed in pairs (mixup {self.mixup:g})"
        if self.crop_scale:
            share = f"{100 * self.crop_scale:g} % or more of each"
            kind += f", shown in random crops ({share}, flipped or not, drawn anew for each upload)"
        if self.uploads_per_picture > 1:
            kind += f", {self.uploads_per_picture} times under masks drawn independently"
        return f"{sees} {kind}"
