"""Attacks of the breaching library, run by its own attacker classes and Hydra configurations.

Every image configuration of breaching 0.1.2 that an honest-but-curious server can run is an attack here. Left out are:

- ``multiscale_ghiasi``: its attacker calls its own optimiser with one argument too many;
- ``analytic`` and ``rgap``: they invert chains of linear or convolutional layers, no transformers;
- ``imprint`` and ``decepticon``: they need a server that changes the model, and text for the latter;
- ``sanitycheck`` and ``_default_optimization_attack``: no attack, and the base of the others.

breaching expects these, and gets them on a copy of the model:

- gradients as a list in the order of the network's parameters, the classifier's last. That is the
  order of the timm backbone; MJP's unknown embedding is no part of it, so on an MJP upload these
  attacks are naive: its gradient is not used, and the network is run without a mask;
- pictures in the network's input space; mean and standard deviation come as metadata;
- an attention that can be differentiated twice, so timm's fused attention is switched off;
- torch's global random state, which is seeded for the run and put back.
"""

import copy
import functools
import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf
from pydantic import ConfigDict, Field
from torch import Generator, nn
from typing_extensions import override

from fedmjp.attacks.base import Attack
from fedmjp.attacks.breaching_case import PREFIX, case_of
from fedmjp.attacks.breaching_watch import CarriedError, Watch, listening
from fedmjp.attacks.labels import labels_of
from fedmjp.attacks.token_gradients import positions_refusal
from fedmjp.config import Config
from fedmjp.errors import AttackFailedError, ConfigError, suggestion
from fedmjp.models.april import AprilBlock
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.seeds import scoped_randomness
from fedmjp.threat import ThreatModel

ATTACK_TYPES = ("optimization", "joint-optimization")
COUNTS = {"iterations": "optim.max_iterations", "restarts": "restarts.num_trials"}  # our names, breaching's keys


class BreachingOptions(Config):
    """Keys of breaching's own configuration, dotted, with values in Hydra's grammar."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def overrides(self) -> dict[str, Any]:
        """Return all options as keys of breaching's configuration; refuse one that is given under both names."""
        changes = dict(self.model_extra or {})
        for name, key in COUNTS.items():
            value = getattr(self, name) if name in type(self).model_fields else None
            if value is not None and key in changes:
                raise ConfigError(f"{name} and {key} are the same option, give one of them")
            if value is not None:
                changes[key] = value
        return changes


class OptimisationOptions(BreachingOptions):
    """How long to optimise, and keys of breaching's own configuration."""

    iterations: int | None = Field(None, ge=1, description="of a trial; breaching's own number without it")
    restarts: int | None = Field(None, ge=1, description="trials from new noise, of which the best is kept")
    seconds: float | None = Field(
        None, gt=0, description="per upload; after that, and one iteration at least, the best so far is the result"
    )


class BreachingAttack(Attack):
    """One of breaching's configurations.

    ``config_name`` is the file in breaching's ``config/attack``; ``limitation`` what a reader must know of its scores
    on any model, empty if nothing.
    """

    config_name: ClassVar[str]
    limitation: ClassVar[str] = ""
    options_type: ClassVar[type[Config]] = OptimisationOptions
    stack = 1
    optimises = True
    requires = "each client's own update; labels that are known, or recovered from the head's bias"
    exploits = "the gradient of every weight that an undefended model has, or their change"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._overrides = self.options.overrides()
        if self._overrides:
            _ = self.config  # a wrong key is an error now, not after hours of other attacks

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name all of the network's parameters."""
        return [PREFIX + name for name, _ in model.backbone.named_parameters()]

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse labels that would come from two sources."""
        del model
        if "label_strategy" in self._overrides and (threat.labels_known or threat.update == "delta"):
            return "label_strategy is for unknown labels behind a gradient; leave it out"
        return None

    def caveat(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Name its own limitation, and that it is naive on MJP uploads and under label smoothing."""
        remarks = {
            self.limitation: bool(self.limitation),
            "naive: runs the network without a mask and does not use the unknown embedding's gradient": model.defended,
            "naive: its loss has no label smoothing": threat.label_smoothing > 0,
        }
        return "; ".join(text for text, holds in remarks.items() if holds) or None

    @functools.cached_property
    def config(self) -> Any:
        """Compose breaching's configuration from its own file and the overrides, as Hydra does.

        Raises:
            ConfigError: On a key that the file does not have, or a value that Hydra cannot read or breaching use.
        """
        default = _compose(self.config_name, [])
        valid_keys = list(_keys(default))
        for key in self._overrides:
            if key not in valid_keys:
                hint = suggestion(key, [*self.options_type.model_fields, *valid_keys])
                raise ConfigError(f"unknown key {key!r}, {hint}")
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self._overrides.items()}
        config = _compose(self.config_name, [f"{key}={value}" for key, value in values.items()])
        if self.optimises and config.attack_type not in ATTACK_TYPES:
            raise ConfigError(f"attack_type = {config.attack_type!r}: must be one of {', '.join(ATTACK_TYPES)}")
        for key in self._overrides:
            _check_kind(key, default=OmegaConf.select(default, key), value=OmegaConf.select(config, key))
        return config

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: Generator
    ) -> Reconstruction:
        breaching_finds_labels = self.config.attack_type == "joint-optimization" or "label_strategy" in self._overrides
        labels = None if breaching_finds_labels else labels_of(upload, model, threat)
        container = _breaching().cases.models.model_preparation.VisionContainer
        case = case_of(upload, model, threat, labels=labels, container=container)
        prepare, loss = _breaching().attacks.prepare_attack, nn.CrossEntropyLoss()
        start, watch = time.monotonic(), None
        with listening("breaching") as messages, torch.enable_grad():
            try:
                attacker = prepare(case.network, loss, self.config, case.setup)
                if self.optimises:
                    watch = Watch(attacker, messages, seconds=self.options.seconds, on_progress=self.on_progress)
                with scoped_randomness(generator.initial_seed()):
                    pictures, stats = attacker.reconstruct([case.payload], [case.shared], server_secrets={})
            except CarriedError as carried:
                raise carried.args[0] from None
            except Exception as error:
                text = " ".join(str(error).split())
                raise AttackFailedError(f"{self.name}: breaching raised {type(error).__name__}: {text}") from error
        if watch and not math.isfinite(stats["opt_value"]):
            raise AttackFailedError(f"{self.name}: no trial came to a result; breaching says: {' '.join(messages)}")
        images = pictures["data"].detach()
        if not bool(torch.isfinite(images).all()):
            raise AttackFailedError(f"{self.name}: breaching's reconstruction holds NaN or infinite values")
        diagnostics = {**(watch.diagnostics if watch else {}), "seconds": time.monotonic() - start}
        return Reconstruction(model.denormalise(images).to("cpu", torch.float32), diagnostics)


@functools.cache
def _breaching() -> Any:
    """Import the library at its first use: that takes seconds and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import breaching  # type: ignore[import-untyped]  # noqa: PLC0415 (see above)
    return breaching


def _check_kind(key: str, *, default: Any, value: Any) -> None:
    """Refuse a value of another kind than breaching's own, which would fail from deep inside."""
    if hasattr(default, "items") and value is not None and not hasattr(value, "items"):
        raise ConfigError(
            f"{key} = {value!r}: is a group of keys; set {', '.join(f'{key}.{name}' for name in default)}"
        )
    if isinstance(default, int | float) and not isinstance(default, bool):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{key} = {value!r}: must be a finite number")
        if key in COUNTS.values() and value < 1:
            raise ConfigError(f"{key} = {value!r}: must be at least 1")


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all nodes below a node of a configuration."""
    for key, value in node.items():
        yield f"{prefix}{key}"
        if hasattr(value, "items"):
            yield from _keys(value, f"{prefix}{key}.")


def _compose(name: str, overrides: Sequence[str]) -> Any:
    """Compose a configuration, from a cache: a campaign plans the same ones again and again."""
    return copy.deepcopy(_composed(name, tuple(overrides)))


@functools.lru_cache(maxsize=64)
def _composed(name: str, overrides: tuple[str, ...]) -> Any:
    breaching = _breaching()
    from hydra.errors import HydraException  # noqa: PLC0415 (comes with breaching, which is imported late)

    with listening("breaching"), _hydra_to_itself():
        try:
            return breaching.get_attack_config(name, list(overrides))
        except HydraException as error:
            raise ConfigError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None


@contextmanager
def _hydra_to_itself() -> Iterator[None]:
    """Hide an application's global state of Hydra for the while, and put it back."""
    from hydra.core.global_hydra import GlobalHydra  # noqa: PLC0415 (comes with breaching, which is imported late)
    from hydra.version import VersionBase  # noqa: PLC0415

    instance, version = GlobalHydra.instance(), VersionBase.instance()
    hydra, base = instance.hydra, version.version_base
    instance.clear()
    try:
        yield
    finally:
        instance.hydra, version.version_base = hydra, base
        GlobalHydra.set_instance(instance)


class DeepLeakage(BreachingAttack):
    """L-BFGS on the squared distance of gradients, for pictures and labels together."""

    config_name = "deepleakage"
    name = "breaching_deepleakage"
    paper = "Zhu et al., Deep Leakage from Gradients, NeurIPS 2019; breaching 0.1.2"
    summary = "L-BFGS on the Euclidean gradient distance, labels optimised too, even known ones"
    requires = "each client's own update"


class InvertingGradients(BreachingAttack):
    """Signed Adam on the cosine distance of gradients with total variation."""

    config_name = "invertinggradients"
    name = "breaching_invertinggradients"
    paper = "Geiping et al., Inverting Gradients, NeurIPS 2020; breaching 0.1.2"
    summary = "signed Adam on the cosine gradient distance and total variation"


class Modern(BreachingAttack):
    """Inverting Gradients with the settings of breaching's authors for larger networks."""

    config_name = "modern"
    name = "breaching_modern"
    paper = "after Geiping et al., NeurIPS 2020; breaching 0.1.2's own settings"
    summary = "Inverting Gradients with patterned start, soft sign, colour total variation, head features"


class SeeThroughGradients(BreachingAttack):
    """Adam with noise on the squared distance of gradients with picture priors."""

    config_name = "seethroughgradients"
    name = "breaching_seethroughgradients"
    paper = "Yin et al., See through Gradients, CVPR 2021; breaching 0.1.2"
    summary = "Langevin Adam on the Euclidean gradient distance, total variation and norm"
    limitation = "its batch-norm prior has nothing to act on in this model; breaching has no group consistency"


class Tag(BreachingAttack):
    """Adam on a squared and absolute distance of gradients that weighs early layers more."""

    config_name = "tag"
    name = "breaching_tag"
    paper = "Deng et al., TAG, Findings of EMNLP 2021; breaching 0.1.2"
    summary = "AdamW on a layer-weighted L2 and L1 gradient distance, labels optimised too, even known ones"
    requires = "each client's own update"


class Wei(BreachingAttack):
    """L-BFGS on the squared distance of gradients plus the task loss, from a patterned start."""

    config_name = "wei"
    name = "breaching_wei"
    paper = "Wei et al., A Framework for Evaluating Gradient Leakage Attacks, ESORICS 2020; breaching 0.1.2"
    summary = "L-BFGS on the Euclidean gradient distance and the task loss, patterned start"


class BeyondInfering(BreachingAttack):
    """L-BFGS on the squared distance of gradients with total variation; named as breaching spells it."""

    config_name = "beyondinfering"
    name = "breaching_beyondinfering"
    paper = "Wang et al., Beyond Inferring Class Representatives, INFOCOM 2019; breaching 0.1.2"
    summary = "L-BFGS on the Euclidean gradient distance and total variation, without the paper's GAN"


class Legacy(BreachingAttack):
    """Inverting Gradients with earlier settings of breaching's authors."""

    config_name = "legacy"
    name = "breaching_legacy"
    paper = "after Geiping et al., NeurIPS 2020; breaching 0.1.2's earlier settings"
    summary = "Inverting Gradients from a zero start, soft sign, colour total variation, head features"


class ClsAttack(BreachingAttack):
    """The optimisation of the class-fishing attack, without its malicious server."""

    config_name = "clsattack"
    name = "breaching_clsattack"
    paper = "Wen et al., Fishing for User Data, ICML 2022, the optimisation only; breaching 0.1.2"
    summary = "Inverting Gradients from a random pattern, soft sign, colour total variation"
    limitation = "the optimisation alone: the paper's server changes the weights to single out a picture"


class AprilAnalytic(BreachingAttack):
    """breaching's closed form of APRIL, a cross-check of ``april``.

    On an MJP upload it takes E_pos's gradient alone, whose masked rows are zero.
    """

    config_name = "april_analytic"
    name = "breaching_april"
    paper = "Lu et al., APRIL, CVPR 2022; breaching 0.1.2"
    summary = "breaching's closed form on attention and position-embedding gradients: a cross-check of april"
    requires = "an *_april model (first block without first norm and residuals); one picture's gradient"
    exploits = "gradients of the position embedding and the first attention"
    options_type = BreachingOptions
    optimises = False

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse models without positions, all but the APRIL architecture, and all but the gradient of one picture."""
        if unseen := positions_refusal(model):
            return unseen
        if not isinstance(model.backbone.blocks[0], AprilBlock):
            return "needs a first block without first norm and residuals; take the model's _april variant"
        if model.backbone.num_prefix_tokens != 1:
            return f"needs one token before the patches, the model has {model.backbone.num_prefix_tokens}"
        if threat.update != "gradient" or threat.batch_size != 1:
            return f"needs the gradient of one picture, not a {threat.update} of {threat.batch_size}"
        return super().requirement(model, threat)
