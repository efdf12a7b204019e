"""The contract of an attack: uploads and the server's own knowledge in, pictures out. Private data has no way in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, cast, get_args, overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from fedmjp.arithmetic import computing
from fedmjp.attacks.adamw import adamw_refusal, as_gradient, gradient_behind
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.defences.pipeline import Pipeline
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, ConfigError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.entrance import Entrance, denormalised
from fedmjp.models.roles import roles_of
from fedmjp.patches import from_patches
from fedmjp.records import ATTACKED, Disclosure, Features, Reconstruction, Upload, weights_digest
from fedmjp.seeds import torch_generator
from fedmjp.settings import Reveals, Role
from fedmjp.tensors import without_decay
from fedmjp.threat import ThreatModel

# Marks of defences behind which weight decay is still what it was in a delta.
UNSCALED: frozenset[Mark] = frozenset({"shuffled", "masked", "withheld", "noisy", "rounded", "summed"})
Progress = Callable[[int, int, float], None]  # called with finished steps, all steps, loss
# The model that an attack needs: the network, or its two embeddings alone.
Model = TypeVar("Model", bound=Entrance, contravariant=True, default=VitClassifier)  # noqa: PLC0105 (in every signature)
# The disclosure that it returns for an upload.
Made = TypeVar("Made", bound=Disclosure, covariant=True, default=Reconstruction)  # noqa: PLC0105


class Attack(ABC, Generic[Model, Made]):
    """An attack: it turns uploads, and what the server itself knows, into what they disclose of private pictures.

    A subclass states these class attributes, which `fedmjp list attacks NAME` prints:

    - ``name``, by which it is called, and ``summary``, one line;
    - ``paper``, its source;
    - ``requires``, the conditions under which it applies, and ``exploits``, the weakness that it makes use of.

    It says in ``tensors`` what it reads of an upload, and in ``requirement`` which models and threat models it refuses.
    It overrides ``reconstruct``, or ``reconstruct_stack`` if it gains from several uploads at once. Callers use
    ``run``, which checks first and hands over no tensor but those that ``tensors`` names.

    Further attributes, each with a default:

    - ``role``: "attack"; "floor", a baseline that uses nothing of the upload; or "bound", which is given more than any
      real server sees. Only attacks are ranked.
    - ``reveals``: "pictures" (a ``Reconstruction`` per upload), "features" with labels, or "labels" (``Features``).
    - ``options_type``: the configuration model of its options; ``Config`` has none.
    - ``stack``: the number of uploads that it gains from getting at once.
    - ``optimises``: whether it iterates rather than solves.
    - ``reads_others``: whether it reads ``Upload.others``, further uploads of the same client.
    - ``takes_sums``: whether it reads an upload that is a sum over several clients.
    - ``any_steps``: whether it reads weight deltas of any SGD steps: with momentum, or on parts of a batch.
    - ``reads_signs``: whether signs of a gradient suffice, as a step of AdamW shows them (``fedmjp.attacks.adamw``).
    - ``handled``: the marks of defences that it takes into account (``handles``).
    - ``uses_natural_patches``: whether it uses the prior of ``fedmjp.attacks.natural_patches``, whose pictures must not
      be attacked.

    An ``Attack[Entrance]`` needs the two embeddings alone and takes users' own models too (``fedmjp.adopt``), or the
    layers of any module (``fedmjp.models.layers.LayeredNetwork``); any other needs a ``VitClassifier``. ``on_progress``
    is called while an attack optimises.

    Args:
        options: Values for the fields of ``options_type``; a ``ConfigError`` names those that are wrong.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    requires: ClassVar[str]
    exploits: ClassVar[str]
    role: ClassVar[Role] = "attack"
    reveals: ClassVar[Reveals] = "pictures"
    options_type: ClassVar[type[Config]] = Config
    stack: ClassVar[int] = 16
    optimises: ClassVar[bool] = False
    reads_others: ClassVar[bool] = False
    takes_sums: ClassVar[bool] = False
    any_steps: ClassVar[bool] = False
    reads_signs: ClassVar[bool] = False
    needs_network: ClassVar[bool] = True
    handled: ClassVar[frozenset[Mark]] = frozenset()
    uses_natural_patches: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__dict__.get("__orig_bases__", ()):
            if (arguments := get_args(base)) and isinstance(arguments[0], type):
                cls.needs_network = arguments[0] is not Entrance

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = self.options_type.parse(options or {})
        self.on_progress: Progress = lambda *_: None

    @abstractmethod
    def tensors(self, model: Model) -> Sequence[str]:
        """Name the tensors of an upload that the attack reads; it is given no others.

        Args:
            model: The model that the server had sent.
        """

    def requirement(self, model: Model, threat: ThreatModel) -> str | None:
        """Say which requirement of its own this model or threat model fails.

        Args:
            model: The model that the server had sent.
            threat: The knowledge that the attacker is granted.

        Returns:
            The failed requirement; None if the attack applies, which is the default.
        """
        del model, threat
        return None

    def reconstruct(self, upload: Upload, model: Model, threat: ThreatModel, generator: torch.Generator) -> Made:
        """Reconstruct the pictures behind one checked upload; a subclass overrides this, or ``reconstruct_stack``.

        Args:
            upload: A client's tensors, those that ``tensors`` names.
            model: The model that the server had sent, on the device where the work is done. It must not be changed.
            threat: The knowledge that the attacker is granted.
            generator: The only source of randomness, on the CPU, seeded by the upload's content.

        Returns:
            A ``Reconstruction`` of images (pictures, 3, height, width) in [0, 1], or ``Features``, as ``reveals`` says.
        """
        del upload, model, threat, generator
        raise AttackFailedError(f"{self.name}: its class overrides neither reconstruct nor reconstruct_stack")

    def reconstruct_stack(
        self, uploads: Sequence[Upload], model: Model, threat: ThreatModel, *, generators: Sequence[torch.Generator]
    ) -> list[Made]:
        """Reconstruct the pictures behind several checked uploads, one by one unless a subclass overrides this.

        Args:
            uploads: Independent uploads; a result must not depend on its neighbours.
            model: The model that the server had sent.
            threat: The knowledge that the attacker is granted.
            generators: A source of randomness for each upload.
        """
        pairs = zip(uploads, generators, strict=True)
        return [self.reconstruct(upload, model, threat, generator) for upload, generator in pairs]

    def caveat(self, model: Model, threat: ThreatModel) -> str | None:
        """Say what a reader must know of its scores under this model and threat model; None if nothing.

        Args:
            model: The model that the server had sent.
            threat: The knowledge that the attacker is granted.
        """
        del model, threat
        return None

    def handles(self, model: Model, threat: ThreatModel) -> frozenset[Mark]:
        """Name the marks of defences that it takes into account with this model and threat model.

        A mark that it is blind to does not belong here, even if the result often comes out well.

        Args:
            model: The model that the server had sent.
            threat: The knowledge that the attacker is granted.

        Returns:
            ``handled``, unless a subclass distinguishes models or threat models.
        """
        del model, threat
        return self.handled

    @property
    def usual_seconds(self) -> float | None:
        """Return the seconds that one upload usually takes: the budget, or None without a budget."""
        seconds: float | None = getattr(self.options, "seconds", None)
        return seconds

    def run(
        self, uploads: Sequence[Upload], model: Entrance, threat: ThreatModel, *, generator: torch.Generator
    ) -> list[Made]:
        """Check a stack of independent uploads, attack them, and check the result. Subclasses leave it as it is.

        Args:
            uploads: All computed with ``model``'s weights, their ``others`` with any. They are not changed.
            model: The model that the server had sent; its device is where the work is done. It is not changed.
            threat: The knowledge that the attacker is granted.
            generator: Its initial seed is the source of randomness. Every upload gets a generator of its own from that
                and its content, so that a result never depends on its neighbours.

        Returns:
            What each upload discloses, in the same order and on the CPU, for as many pictures as it was computed from.

        Raises:
            AttackNotApplicableError: If the model, the threat model or an upload does not meet ``requires``; the
                message says which requirement fails. It is never run regardless.
            AttackFailedError: If it broke down, or returned something else.
        """
        if self.needs_network and not isinstance(model, VitClassifier):
            raise self._not_applicable(
                "needs the network behind the tokens; of an adopted model only the entrance is known: "
                "take an attack that reads patch and position embedding alone, such as patch_embedding"
            )
        network = cast("Model", model)  # for an attack that does not need the network, any entrance fits
        if refusal := self.refusal(network, threat):
            raise self._not_applicable(refusal)
        if self.role != "bound" and names.ORACLE_TOKEN_GRADIENTS in self.tensors(network):
            raise self._not_applicable(
                f"reads {names.ORACLE_TOKEN_GRADIENTS!r}, which no upload holds; only a bound may"
            )
        shapes = _shapes(network)
        declared = [self._declared(upload, network, threat, shapes) for upload in uploads]
        if threat.local_optimiser == "adamw" and self.role != "floor":
            declared = [gradient_behind(upload, network, threat, signs=self.reads_signs) for upload in declared]
            threat = as_gradient(threat)
        if threat.local_weight_decay:
            declared = [undecayed(upload, network, threat) for upload in declared]
        generators = _Generators(partial(self._generator_for, model=network, generator=generator), declared)
        with computing("float32", network.mean.device):
            try:
                disclosures = self.reconstruct_stack(declared, network, threat, generators=generators)
            except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                raise AttackFailedError(f"{self.name}: a system of equations has no solution: {error}") from error
        return self._checked(disclosures, uploads, network)

    def refusal(self, model: Model, threat: ThreatModel) -> str | None:
        """Say which requirement, of all attacks or its own, this model or threat model fails.

        Args:
            model: The model that the server had sent.
            threat: The knowledge that the attacker is granted.

        Returns:
            The failed requirement; None if the attack applies.
        """
        if threat.pipeline.clients > 1 and not self.takes_sums:
            return f"needs each client's own update, not the sum over {threat.pipeline.clients} clients"
        if threat.local_weight_decay and self.role != "floor" and (reason := _decay_refusal(threat)):
            return reason
        if threat.local_optimiser == "adamw" and self.role != "floor":
            if reason := adamw_refusal(threat):
                return reason
            if self.role == "bound":
                return "is given gradients at the tokens beside a gradient, not beside a step of AdamW"
            threat = as_gradient(threat)
        if threat.mixup and self.optimises:
            return "computes gradients of candidates with whole labels, not of pictures that are mixed in pairs"
        if self.optimises and threat.local_weight_decay and threat.local_steps > 1:
            return f"computes {threat.local_steps} steps of candidates without weight decay"
        if not self.any_steps and (threat.local_momentum or threat.local_batch_size):
            return "knows plain SGD steps on the whole batch, not momentum or steps on parts of it"
        return self.requirement(model, threat) or self._withheld(model, threat)

    def adapted(
        self, pipeline: Pipeline, model: Model, threat: ThreatModel, *, besides: frozenset[Mark] = frozenset()
    ) -> bool:
        """Say whether it takes all that these defences do into account: only then its failure speaks for them.

        Args:
            pipeline: All defences of a scenario, those before an update included.
            model: The model that the server had sent.
            threat: The knowledge that the attacker is granted.
            besides: Marks that need not be handled: those of what follows the attack, or of the pictures' reference.
        """
        if not pipeline.defences:
            return False
        handled = self.handles(model, threat) | besides | {"withheld"}  # it is refused what it would need
        return pipeline.marks <= handled and self.refusal(model, threat) is None

    def _withheld(self, model: Model, threat: ThreatModel) -> str | None:
        needed = set(self.tensors(model))
        for defence in threat.pipeline.defences:
            if missing := sorted(needed & defence.withheld(roles_of(model))):
                return f"needs {', '.join(missing)}, which {defence.name} withholds"
        if threat.server and (mixed := sorted(needed & threat.server.build().mixed(model))):
            isolates = f"which show all pictures of an upload: {threat.server.name} isolates one elsewhere"
            return f"reads {', '.join(mixed)}, {isolates}"
        return None

    def _not_applicable(self, reason: str) -> AttackNotApplicableError:
        return AttackNotApplicableError(f"{self.name}: {reason}")

    def _declared(self, upload: Upload, model: Model, threat: ThreatModel, shapes: Mapping[str, torch.Size]) -> Upload:
        """Refuse an upload that does not fit; keep only the tensors that the attack declares to read."""
        read = self.tensors(model)
        if misfit := _misfit(upload, threat, read, shapes):
            raise self._not_applicable(misfit)
        siblings = upload.others if self.reads_others else ()
        return replace(
            upload,
            tensors={name: upload.tensors[name] for name in read} or upload.tensors,
            others=tuple(self._declared(sibling, model, threat, shapes) for sibling in siblings),
        )

    def _generator_for(self, upload: Upload, model: Model, generator: torch.Generator) -> torch.Generator:
        read = self.tensors(model)
        contents = [weights_digest({name: sent.tensors[name] for name in read}) for sent in (upload, *upload.others)]
        return torch_generator(generator.initial_seed(), "upload", *contents)

    def _checked(self, disclosures: Sequence[Disclosure], uploads: Sequence[Upload], model: Model) -> list[Made]:
        """Refuse results that the contract excludes; move the others to the CPU."""
        if len(disclosures) != len(uploads):
            raise AttackFailedError(f"{self.name}: {len(disclosures)} reconstructions for {len(uploads)} uploads")
        checked: list[Disclosure] = []
        expected: tuple[int, ...]
        for result, upload in zip(disclosures, uploads, strict=True):
            diagnostics = {name: float(value) for name, value in getattr(result, "diagnostics", {}).items()}
            if isinstance(result, Reconstruction) and self.reveals == "pictures":
                shape, expected = result.images.shape, (upload.num_examples, 3, *model.pixels)
                visible = None if result.visible is None else result.visible.cpu()
                checked.append(Reconstruction(result.images.cpu(), diagnostics, visible))
            elif isinstance(result, Features) and self.reveals != "pictures":
                shape, expected = result.labels.shape, (upload.num_examples,)
                features = None if result.features is None else result.features.cpu()
                if (features is None) is (self.reveals == "features"):
                    raise AttackFailedError(f"{self.name}: reveals {self.reveals}, but gave features {features}")
                facts = {name: values.cpu() for name, values in result.facts.items()}
                checked.append(Features(result.labels.cpu(), features, diagnostics, facts, result.layer))
            else:
                kind = "a Reconstruction" if self.reveals == "pictures" else "Features"
                raise AttackFailedError(f"{self.name}: gave a {type(result).__name__} instead of {kind}")
            if tuple(shape) != expected:
                raise AttackFailedError(
                    f"{self.name}: gave {self.reveals} of shape {tuple(shape)} instead of {expected}"
                )
        return cast("list[Made]", checked)


def undecayed(upload: Upload, model: Entrance, threat: ThreatModel) -> Upload:
    """Take off a delta of SGD the weight decay, which the server set itself: sums of gradients are left.

    Args:
        upload: A client's tensors, by the names of the model.
        model: With the weights that the server had sent.
        threat: States the recipe.
    """
    if not threat.local_weight_decay or threat.local_optimiser != "sgd":
        return upload
    kept, known = threat.unrolled.kept, dict(model.named_parameters())
    tensors = {
        name: without_decay(tensor, known[name], kept) if name in known else tensor
        for name, tensor in upload.tensors.items()
    }
    same = (sibling for sibling in upload.others if sibling.weights == upload.weights)
    return replace(upload, tensors=tensors, others=tuple(undecayed(sibling, model, threat) for sibling in same))


def _decay_refusal(threat: ThreatModel) -> str | None:
    """Say why weight decay cannot be taken off what a defence made of a delta."""
    if threat.local_optimiser != "sgd":
        return None
    changed = [defence.name for defence in threat.pipeline.defences if not defence.marks <= UNSCALED]
    return f"takes weight decay off whole deltas, which {changed[0]} scales or cuts" if changed else None


def _shapes(model: Entrance) -> dict[str, torch.Size]:
    """Map the name of each tensor that an upload may hold to its shape (a walk that takes longer than a solution)."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if model.has_positions:
        shapes[names.ORACLE_TOKEN_GRADIENTS] = shapes[names.POSITION_EMBEDDING]
    return shapes


@dataclass(eq=False)
class _Generators(Sequence[torch.Generator]):
    """Generators of several uploads, each seeded at its first use: to digest an upload takes as long as to solve it."""

    make: Callable[[Upload], torch.Generator]
    uploads: Sequence[Upload]
    seeded: dict[int, torch.Generator] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.uploads)

    @overload
    def __getitem__(self, index: int) -> torch.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Generator]: ...
    def __getitem__(self, index: int | slice) -> torch.Generator | Sequence[torch.Generator]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        if places not in self.seeded:
            self.seeded[places] = self.make(self.uploads[places])
        return self.seeded[places]


def _misfit(upload: Upload, threat: ThreatModel, read: Sequence[str], shapes: Mapping[str, torch.Size]) -> str | None:
    if upload.kind not in ATTACKED:
        contents = "whole weights: subtract those that were sent" if upload.kind == "weights" else "nobody knows what"
        return f"the upload holds {contents}; attacks read what is known to be a {' or a '.join(ATTACKED)}"
    if upload.kind != threat.update:
        return f"the upload is a {upload.kind}, the threat model speaks of a {threat.update}"
    if upload.num_examples != threat.pictures:
        return f"the upload is of {upload.num_examples} pictures, the threat model speaks of {threat.pictures}"
    if (upload.labels is not None) != threat.labels_known:
        comes = "comes with" if upload.labels is not None else "comes without"
        granted = "grants" if threat.labels_known else "does not grant"
        return f"the upload {comes} labels, the threat model {granted} them"
    for name in read:
        if name not in shapes:
            return f"the model has no tensor {name!r}"
        if name not in upload.tensors:
            return f"the upload has no tensor {name!r}"
        shape, expected = tuple(upload.tensors[name].shape), tuple(shapes[name])
        if shape != expected:
            return f"upload tensor {name!r} has shape {shape}, the model's has {expected}"
    return None


def showing_pictures(attack: Attack[Model, Disclosure]) -> Attack[Model, Reconstruction]:
    """Narrow the type of an attack for callers that go on with its pictures.

    Args:
        attack: Any attack.

    Raises:
        ConfigError: If it reveals no pictures.
    """
    if attack.reveals != "pictures":
        raise ConfigError(f"{attack.name} reveals {attack.reveals}: name an attack that reveals pictures")
    return cast("Attack[Model, Reconstruction]", attack)


def picture(patches: Tensor, model: Entrance) -> Tensor:
    """Assemble a picture (1, 3, height, width), float32 in [0, 1] on the CPU, from normalised patches.

    Args:
        patches: Rows (patches, 3 * patch_size ** 2) in reading order.
        model: States the sizes, and the mean and standard deviation of its inputs.
    """
    entered = from_patches(patches[None], model.pixels, model.patch_size)
    return denormalised(entered, model.mean, model.std).float().cpu()


def on_device(upload: Upload, name: str, model: Entrance) -> Tensor:
    """Return a tensor of the upload in float64 on the model's device.

    Args:
        upload: A client's tensors, in any precision.
        name: The tensor's name.
        model: Its ``mean`` states the device.
    """
    return upload.tensors[name].to(model.mean.device, torch.float64)
