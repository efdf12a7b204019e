"""The contract of an attack: uploads and the server's own knowledge in, pictures out; no way in for private data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, cast, overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from fedmjp.arithmetic import computing
from fedmjp.attacks.adamw import adamw_refusal, as_gradient, gradient_behind
from fedmjp.attacks.kinds import Reveals, Role
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.defences.pipeline import Pipeline
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, ConfigError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.entrance import Entrance
from fedmjp.models.roles import roles_of
from fedmjp.patches import from_patches
from fedmjp.records import ATTACKED, Disclosure, Features, Reconstruction, Upload, weights_digest
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

Progress = Callable[[int, int, float], None]  # called with steps done, steps in total, loss
# What an attack asks of the model: the network, or only its entrance.
Model = TypeVar("Model", bound=Entrance, contravariant=True, default=VitClassifier)  # noqa: PLC0105 (in every signature)
# What it makes of an upload.
Made = TypeVar("Made", bound=Disclosure, covariant=True, default=Reconstruction)  # noqa: PLC0105


class Attack(ABC, Generic[Model, Made]):
    """Base of all attacks.

    Class attributes state what `fedmjp list attacks NAME` prints and how the engine calls it:

    - ``name``; ``paper``, the source; ``summary``, one line;
    - ``requires``, what must hold, in words; ``exploits``, what in an upload it makes use of;
    - ``role``: "attack"; "floor", a reference that uses nothing of the upload; or "bound", one that
      is given more than any real server sees. Only attacks are ranked;
    - ``reveals``: "pictures", then it gives a ``Reconstruction`` per upload; "features" (with labels) or "labels"
      alone, then it gives ``Features``;
    - ``options_type``: the configuration model of its options; ``Config`` itself has none;
    - ``stack``: how many uploads it profits from getting at once;
    - ``optimises``: whether it iterates, rather than solves;
    - ``reads_others``: whether it reads an upload's ``others``, which all others are not given;
    - ``takes_sums``: whether it can be given an upload that is a sum over several clients;
    - ``any_steps``: whether it reads weight deltas whatever SGD's steps were;
    - ``reads_signs``: whether signs of a gradient are enough, as a step of AdamW shows them; the sizes of its entries
      are told where they are small (``fedmjp.attacks.adamw``);
    - ``needs_network``: whether it needs a ``VitClassifier``; the others, an ``Attack[Entrance]``, take
      users' own models too (``fedmjp.models.adopt``);
    - ``uses_natural_patches``: whether it uses the prior of ``fedmjp.attacks.natural_patches``, whose pictures must
      not be attacked.

    An attack is made with values for ``options_type``; ``ConfigError`` says which are wrong. ``on_progress``
    is called while it optimises.
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
    uses_natural_patches: bool = False

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = self.options_type.parse(options or {})
        self.on_progress: Progress = lambda *_: None

    @property
    def usual_seconds(self) -> float | None:
        """Of work on one upload: its budget, unless it seldom needs all of that; None if it has no budget."""
        seconds: float | None = getattr(self.options, "seconds", None)
        return seconds

    def reconstruct(
        self, uploads: Sequence[Upload], model: Entrance, threat: ThreatModel, *, generator: torch.Generator
    ) -> list[Made]:
        """Reconstruct the pictures behind a stack of independent uploads.

        Args:
            uploads: All computed with ``model``'s weights, their others with any. They are not changed.
            model: That the server had sent; its device is where the work is done. It is not changed.
            threat: What the attacker knows beyond that.
            generator: Its initial seed is the source of randomness. Every upload gets a generator of
                its own from that and its content, so that a result never depends on its neighbours.

        Returns:
            One reconstruction per upload, or what else it ``reveals``, in the same order, each of as many pictures as
            the upload.

        Raises:
            AttackNotApplicableError: If the model, the threat model or an upload does not meet
                ``requires``; the message says which requirement fails. It is never run regardless.
            AttackFailedError: If it broke down, or gave something else than such reconstructions.
        """
        if self.needs_network and not isinstance(model, VitClassifier):
            raise self._not_applicable(
                "needs the network behind the tokens; of an adopted model only the entrance is known: "
                "take an attack that reads patch and position embedding alone, such as patch_embedding"
            )
        fitting = cast("Model", model)  # for an attack that does not need the network, any entrance fits
        if refusal := self.refusal(fitting, threat):
            raise self._not_applicable(refusal)
        if self.role != "bound" and names.ORACLE_TOKEN_GRADIENTS in self.tensors(fitting):
            raise self._not_applicable(
                f"reads {names.ORACLE_TOKEN_GRADIENTS!r}, which no upload holds; only a bound may"
            )
        shapes = _shapes(fitting)
        declared = [self._declared(upload, fitting, threat, shapes) for upload in uploads]
        if self._is_shown_gradients(threat):
            declared = [gradient_behind(upload, fitting, threat, signs=self.reads_signs) for upload in declared]
            threat = as_gradient(threat)
        generators = _Generators(partial(self._generator_for, model=fitting, generator=generator), declared)
        with computing("float32", fitting.mean.device):
            try:
                made = self._reconstruct(declared, fitting, threat, generators=generators)
            except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                raise AttackFailedError(f"{self.name}: a system of equations has no solution: {error}") from error
        return self._checked(made, uploads, fitting)

    @abstractmethod
    def tensors(self, model: Model) -> Sequence[str]:
        """Names of the upload's tensors that the attack reads."""

    @abstractmethod
    def requirement(self, model: Model, threat: ThreatModel) -> str | None:
        """Say which requirement of its own this model or threat model fails; None if the attack applies."""

    def refusal(self, model: Model, threat: ThreatModel) -> str | None:
        """Say which requirement, of all attacks or its own, this model or threat model fails; None if it applies."""
        if threat.clients > 1 and not self.takes_sums:
            return f"needs each client's own update, not the sum over {threat.clients} clients"
        if self.role != "floor" and (reason := adamw_refusal(threat)):
            return reason
        if self.role == "bound" and threat.local_optimiser == "adamw":
            return "is given gradients at the tokens beside a gradient, not beside a step of AdamW"
        if self._is_shown_gradients(threat):
            threat = as_gradient(threat)
        if threat.mixup and self.optimises:
            return "computes gradients of candidates with whole labels, not of pictures that are mixed in pairs"
        if not self.any_steps and (threat.local_momentum or threat.local_batch_size):
            return "knows plain SGD steps on the whole batch, not momentum or steps on parts of it"
        return self.requirement(model, threat) or self._withheld(model, threat)

    def caveat(self, model: Model, threat: ThreatModel) -> str | None:
        """What a reader must know of its scores under this model and threat model; None if nothing."""
        del model, threat
        return None

    def handles(self, model: Model, threat: ThreatModel) -> frozenset[Mark]:
        """Name what defences leave on uploads that it takes into account, with this model and threat model.

        A mark that it is blind to does not belong here, even if the result often comes out well.
        """
        del model, threat
        return frozenset()

    def adapted(
        self, pipeline: Pipeline, model: Model, threat: ThreatModel, *, besides: frozenset[Mark] = frozenset()
    ) -> bool:
        """Say whether it takes all that these defences do into account: only then its failure speaks for them.

        ``pipeline`` holds all of a scenario's defences, those before an update included. Marks ``besides`` need not be
        handled: for what follows the attack, or for what its pictures are held against.
        """
        handled = self.handles(model, threat) | besides | {"withheld"}  # it is refused what it would need
        return bool(pipeline.made) and pipeline.marks <= handled and self.refusal(model, threat) is None

    @abstractmethod
    def _reconstruct(
        self, uploads: Sequence[Upload], model: Model, threat: ThreatModel, *, generators: Sequence[torch.Generator]
    ) -> list[Made]:
        """Attack uploads that were checked; ``generators`` holds one per upload, on the CPU."""

    def _is_shown_gradients(self, threat: ThreatModel) -> bool:
        return threat.local_optimiser == "adamw" and self.role != "floor"

    def _withheld(self, model: Model, threat: ThreatModel) -> str | None:
        roles, needed = roles_of(model), set(self.tensors(model))
        for defence in threat.pipeline.made:
            if missing := sorted(needed & defence.withheld(roles)):
                return f"needs {', '.join(missing)}, which {defence.name} withholds"
        if threat.server and (mixed := sorted(needed & threat.server.made().mixed(model))):
            isolates = f"which show all pictures of an upload: {threat.server.name} isolates one elsewhere"
            return f"reads {', '.join(mixed)}, {isolates}"
        return None

    def _not_applicable(self, reason: str) -> AttackNotApplicableError:
        return AttackNotApplicableError(f"{self.name}: {reason}")

    def _declared(self, upload: Upload, model: Model, threat: ThreatModel, shapes: Mapping[str, torch.Size]) -> Upload:
        """The upload, if it can be attacked, with what the attack declares to read and nothing else."""
        if misfit := _misfit(upload, threat) or self._tensor_misfit(upload, model, shapes):
            raise self._not_applicable(misfit)
        read = self.tensors(model)
        others = upload.others if self.reads_others else ()
        return replace(
            upload,
            tensors={name: upload.tensors[name] for name in read} or upload.tensors,
            others=tuple(self._declared(other, model, threat, shapes) for other in others),
        )

    def _generator_for(self, upload: Upload, model: Model, generator: torch.Generator) -> torch.Generator:
        read = self.tensors(model)
        contents = [weights_digest({name: sent.tensors[name] for name in read}) for sent in (upload, *upload.others)]
        return torch_generator(generator.initial_seed(), "upload", *contents)

    def _checked(self, made: Sequence[Disclosure], uploads: Sequence[Upload], model: Model) -> list[Made]:
        """What the attack gave, on the CPU, if it is what the contract asks for."""
        if len(made) != len(uploads):
            raise AttackFailedError(f"{self.name}: {len(made)} reconstructions for {len(uploads)} uploads")
        checked: list[Disclosure] = []
        expected: tuple[int, ...]
        for given, upload in zip(made, uploads, strict=True):
            diagnostics = {name: float(value) for name, value in getattr(given, "diagnostics", {}).items()}
            if isinstance(given, Reconstruction) and self.reveals == "pictures":
                shape, expected = given.images.shape, (upload.num_examples, 3, model.image_size, model.image_size)
                checked.append(Reconstruction(given.images.cpu(), diagnostics))
            elif isinstance(given, Features) and self.reveals != "pictures":
                shape, expected = given.labels.shape, (upload.num_examples,)
                features = None if given.features is None else given.features.cpu()
                if (features is None) is (self.reveals == "features"):
                    raise AttackFailedError(f"{self.name}: reveals {self.reveals}, but gave features {features}")
                facts = {name: values.cpu() for name, values in given.facts.items()}
                checked.append(Features(given.labels.cpu(), features, diagnostics, facts))
            else:
                asked = "a Reconstruction" if self.reveals == "pictures" else "Features"
                raise AttackFailedError(f"{self.name}: gave a {type(given).__name__} instead of {asked}")
            if tuple(shape) != expected:
                raise AttackFailedError(
                    f"{self.name}: gave {self.reveals} of shape {tuple(shape)} instead of {expected}"
                )
        return cast("list[Made]", checked)

    def _tensor_misfit(self, upload: Upload, model: Model, shapes: Mapping[str, torch.Size]) -> str | None:
        for name in self.tensors(model):
            if name not in shapes:
                return f"the model has no tensor {name!r}"
            if name not in upload.tensors:
                return f"the upload has no tensor {name!r}"
            shape, expected = tuple(upload.tensors[name].shape), tuple(shapes[name])
            if shape != expected:
                return f"upload tensor {name!r} has shape {shape}, the model's has {expected}"
        return None


def _shapes(model: Entrance) -> dict[str, torch.Size]:
    """Of all that an upload may hold, by name: to look through a network takes longer than to solve for a picture."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if model.has_positions:
        shapes[names.ORACLE_TOKEN_GRADIENTS] = shapes[names.POSITION_EMBEDDING]
    return shapes


class _Generators(Sequence[torch.Generator]):
    """One generator per upload, made when it is asked for: to read a whole upload takes as long as to solve it."""

    def __init__(self, make: Callable[[Upload], torch.Generator], uploads: Sequence[Upload]) -> None:
        self._make, self._uploads = make, uploads
        self._made: dict[int, torch.Generator] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    @overload
    def __getitem__(self, index: int) -> torch.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Generator]: ...
    def __getitem__(self, index: int | slice) -> torch.Generator | Sequence[torch.Generator]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        if places not in self._made:
            self._made[places] = self._make(self._uploads[places])
        return self._made[places]


def _misfit(upload: Upload, threat: ThreatModel) -> str | None:
    if upload.kind not in ATTACKED:
        contents = "whole weights: subtract those that were sent" if upload.kind == "weights" else "nobody knows what"
        return f"the upload holds {contents}; attacks read what is known to be a {' or a '.join(ATTACKED)}"
    if upload.kind != threat.update:
        return f"the upload is a {upload.kind}, the threat model speaks of a {threat.update}"
    if upload.num_examples != threat.pictures:
        return f"the upload is of {upload.num_examples} pictures, the threat model speaks of {threat.pictures}"
    if (upload.labels is not None) != threat.labels_known:
        given = "comes with" if upload.labels is not None else "comes without"
        granted = "grants" if threat.labels_known else "does not grant"
        return f"the upload {given} labels, the threat model {granted} them"
    return None


def showing_pictures(attack: Attack[Model, Disclosure]) -> Attack[Model, Reconstruction]:
    """The same attack, for what goes on with its pictures; ConfigError if it reveals none."""
    if attack.reveals != "pictures":
        raise ConfigError(f"{attack.name} reveals {attack.reveals}: name an attack that reveals pictures")
    return cast("Attack[Model, Reconstruction]", attack)


def picture(patches: Tensor, model: Entrance) -> Tensor:
    """From normalised patches (patches, 3 * patch_size ** 2) to a picture (1, 3, size, size), float32 in [0, 1]."""
    return model.denormalise(from_patches(patches[None], model.image_size, model.patch_size)).float().cpu()


def on_device(upload: Upload, name: str, model: Entrance) -> Tensor:
    """A tensor of the upload in float64 on the model's device; half-precision uploads are widened."""
    return upload.tensors[name].to(model.mean.device, torch.float64)
