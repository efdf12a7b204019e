"""The app's own network as attacks take it: whole, its entrance or its head alone, or the layers of any module."""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fedmjp.benchmarks.audit.probe.modules import find_missing_modules
from fedmjp.errors import BadInputError
from fedmjp.models import names
from fedmjp.models.adopt import Adopted, adopt
from fedmjp.models.carrying import Carried, carry
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.layers import LayeredNetwork
from fedmjp.models.roles import roles_of_tensors
from fedmjp.models.sent import SentWeights
from fedmjp.records import Upload, weights_digest
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

# Parts of names that wrappers add: PEFT leaves some of them out of what it sends.
WRAPPERS = frozenset({"base_model", "model", "module", "_module", "_orig_mod", "modules_to_save", "default"})


@dataclass(frozen=True)
class Network:
    """The app's network, with the weights that the server sent, and the form in which attacks read it."""

    module: nn.Module
    seen: VitClassifier | Adopted | SentWeights | LayeredNetwork  # of sent weights the head alone
    carried: Carried | None
    head: tuple[str, str] | None  # the app's names of the last layer's weight and bias
    why: str | None  # why it is not whole
    record: Tensor | None = None  # zeros of the shape and type of what enters for one record; None where unknown

    @property
    def whole(self) -> bool:
        """Tell whether every attack can run it."""
        return self.carried is not None

    @cached_property
    def weights(self) -> str:
        """Return the digest of the weights as attacks see them."""
        if isinstance(self.seen, Adopted | LayeredNetwork):
            return self.seen.weights if isinstance(self.seen, Adopted) else ""
        state = self.seen.state_dict() if isinstance(self.seen, VitClassifier) else dict(self.seen.named_parameters())
        return weights_digest(state)

    def upload(self, update: Mapping[str, Tensor], threat: ThreatModel) -> Upload:
        """Name an update's tensors as attacks do; BadInputError if no tensor has such a name.

        Args:
            update: Tensors by the app's names.
            threat: What the server knows of it.
        """
        tensors: dict[str, Tensor]
        if isinstance(self.seen, LayeredNetwork):
            tensors = {name: tensor for name, tensor in update.items() if name in self.seen.sent}
        elif self.carried is not None:
            tensors = self.carried.tensors(update)
        elif isinstance(self.seen, Adopted) and all(role.name in update for role in self.seen.roles.values()):
            return self.seen.upload(update, examples=threat.pictures, kind=threat.update)
        else:
            pairs = zip((names.HEAD_WEIGHT, names.HEAD_BIAS), self.head or (), strict=False)
            tensors = {role_name: update[app_name] for role_name, app_name in pairs if app_name in update}
        if not tensors:
            raise BadInputError("nothing that was sent is known to any attack")
        return Upload(tensors, threat.update, threat.pictures, server_round=1, node=0, weights=self.weights)

    def in_layers(self, update: Mapping[str, Tensor]) -> "Network":
        """See the network as attacks on linear layers do, which run the app's module itself.

        Args:
            update: By the app's names: what is sent.

        Raises:
            BadInputError: If nobody knows what enters it.
        """
        if self.record is None:
            raise BadInputError("no record was seen entering the network as one tensor")
        shape = tuple(self.record.shape)
        sent = frozenset(name for name, _ in self.module.named_parameters() if name in update)
        if sent not in self._layers:
            layers = LayeredNetwork(self.module, shape, sent, whole_numbers=not self.record.is_floating_point())
            if layers.is_of_pictures:
                layers.mean, layers.std = self.seen.mean[: shape[0]], self.seen.std[: shape[0]]
            self._layers[sent] = layers
        return replace(self, seen=self._layers[sent], carried=None)

    @cached_property
    def _layers(self) -> dict[frozenset[str], LayeredNetwork]:
        """Hold the layered network of each set of names, which is probed once."""
        return {}


def load_network(path: Path, code: Path) -> nn.Module:
    """Load the network that a client was about to train; its classes are those of the app's own code.

    Raises:
        BadInputError: If there is none, or it cannot be loaded.
    """
    if not path.exists():
        raise BadInputError("no network was seen: attacks cannot know what was uploaded")
    if str(code) not in sys.path:
        sys.path.append(str(code))  # last: nothing of the app's hides what is installed
        find_missing_modules(str(code), lambda *_: None)
    try:
        return cast(nn.Module, torch.load(path, weights_only=False, map_location="cpu"))
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInputError(f"the app's network cannot be loaded outside of it: {first}") from error


def by_name(state: Mapping[str, Tensor], arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name arrays as a network's state does: by name, by the order of shapes, else by name in a part or a wrapper.

    Args:
        state: Of the network, in its order.
        arrays: That were sent.
    """
    if set(arrays) <= set(state):
        return dict(arrays)
    if (ordered := _in_order(state, arrays)) is not None:
        return ordered
    endings = {
        name: [key for key in state if key.endswith(f".{name}") and state[key].shape == value.shape]
        for name, value in arrays.items()
    }
    if all(len(matches) == 1 for matches in endings.values()):
        return {endings[name][0]: value for name, value in arrays.items()}
    bare: dict[str, list[str]] = {}
    for key in state:
        bare.setdefault(_bare(key), []).append(key)
    return {
        _only([key for key in bare.get(_bare(name), []) if state[key].shape == value.shape], name): value
        for name, value in arrays.items()
    }


def _in_order(state: Mapping[str, Tensor], arrays: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Name arrays by the only place where their shapes stand one after another in a state; None if there is none.

    Numbered arrays may be those of a part, such as a body without its head; of named ones all shapes must agree.
    Counters are no part of an update, and running statistics none of an optimiser's parameters.
    """
    shapes = [tuple(array.shape) for array in arrays.values()]
    floating = [name for name in state if state[name].is_floating_point()]
    for keys in (list(state), floating, [name for name in floating if "running_" not in name]):
        own = [tuple(state[name].shape) for name in keys]
        places = [place for place in range(len(own)) if own[place : place + len(shapes)] == shapes]
        if len(places) == 1 and (len(own) == len(shapes) or all(name.isdigit() for name in arrays)):
            return dict(zip(keys[places[0] :], arrays.values(), strict=False))
    return None


def draw_unsent(module: nn.Module, sent: AbstractSet[str], trained: Collection[str]) -> list[str]:
    """Draw parameters anew that clients train and never send, such as a personal head: no server knows them.

    Args:
        module: The app's; its weights are replaced.
        sent: Names of the tensors that the server sends.
        trained: Names of the parameters that an optimiser steps.

    Returns:
        Names of what was drawn.
    """
    parameters, generator = dict(module.named_parameters()), torch_generator(0, "unsent parameters")
    is_read = bool(sent) and sent <= module.state_dict().keys()  # else what was sent may have other names
    unsent = [name for name in trained if is_read and name in parameters and name not in sent]
    with torch.no_grad():
        for name in unsent:
            weight = parameters.get(f"{name.rpartition('.')[0]}.weight", parameters[name])
            if weight.ndim > 1:  # as torch draws linear layers and convolutions
                bound = 1 / math.sqrt(weight[0].numel())
                parameters[name].uniform_(-bound, bound, generator=generator)
            else:
                parameters[name].fill_(float(name.endswith("weight")))
    return unsent


def _only(matches: Sequence[str], name: str) -> str:
    """Return the only match, else the name as it is."""
    return matches[0] if len(matches) == 1 else name


def _bare(name: str) -> str:
    """Leave out what wrappers, PEFT above all, put into the name of a tensor; an original that is not trained stays."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def take_in(
    module: nn.Module,
    sent: Mapping[str, Tensor],
    *,
    mean: list[float],
    std: list[float],
    side: int,
    record: Tensor | None = None,
) -> Network:
    """See a network as attacks do, with the weights that the server sent.

    Args:
        module: The app's; its weights are replaced.
        sent: By the module's names; what is missing stays as it is.
        mean: Of the three channels, as the app normalises them.
        std: The same.
        side: Pixels per side of its pictures.
        record: Zeros of the shape and type of what enters it for one record.
    """
    state = module.state_dict()
    fitting = {name: value for name, value in sent.items() if name in state and value.shape == state[name].shape}
    module.load_state_dict({**state, **fitting})
    module.eval()
    head = head_of(module)
    try:
        carried = carry(module, mean=mean, std=std)
        return Network(module, carried.classifier, carried, head, None, record)
    except BadInputError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 (somebody else's module, run on a random picture)
        why = f"its network cannot be run on a random picture: {error}"
    centre, scale = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    try:
        return Network(module, adopt(module, mean=mean, std=std), None, head, why, record)
    except Exception:  # noqa: BLE001
        named_parameters = dict(module.named_parameters())
        sent_names = dict(zip((names.HEAD_WEIGHT, names.HEAD_BIAS), head or (), strict=False))
        parameters = {
            role_name: nn.Parameter(named_parameters[name].detach(), requires_grad=False)
            for role_name, name in sent_names.items()
        }
        head_alone = SentWeights(sent_names, parameters, side, side, mean=centre, std=scale)
        return Network(module, head_alone, None, head, why, record)


def head_of(module: nn.Module) -> tuple[str, str] | None:
    """Name weight and bias of the last linear layer; None if it has no bias, or there is no such layer.

    Args:
        module: The app's.
    """
    parameters = dict(module.named_parameters())
    candidates = sorted(roles_of_tensors(parameters)["head"], key=lambda name: -parameters[name].ndim)
    return (candidates[0], candidates[1]) if len(candidates) == 2 else None
