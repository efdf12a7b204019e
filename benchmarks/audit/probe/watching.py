"""What torch does while an app's client trains: its batches, labels, model, optimiser and steps, by patches of torch.

Nothing of the app is changed: calls go on to what they were made to. The patches stand before the app is imported, so
that names which it takes out of torch are the patched ones.
"""

import copy
import importlib
import json
import pickle
import random
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import Message
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import settings
from .losses import DIGEST_BYTES, LOSSES, describe_loss, digest, find_link, main_input, named_tensors
from .matching import change_sent, count_values, matching_part
from .sampling import current_pass, normalisations, private_optimisers, watch_sampling

KEPT_EXAMPLES = 256  # different ones of a training message
KEPT_BYTES = 2**28
KEPT_EVALUATED, KEPT_EVALUATED_BYTES = 1100, 2**26  # of what a client evaluates with
SAMPLED, OUTLIERS = 100_000, 0.002  # values of a batch that its range is read from, and the share that it may leave out
TOTAL = 1e-3  # deviation from 1 that a sum of targets may have
RULE = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "eps")  # of a parameter group, in each step

_watch: "MessageWatch | None" = None
_depth = 0
_patched = False


class MessageWatch:
    """Sees one training message through; what it saw is kept afterwards.

    Args:
        folder: The evaluator's.
        model: Where the model goes as it is before anything was learnt, which a server knows.
        message: That the client got.
        repeat: Which repeat of it this is. All draw the same, but from its last loss on each draws another noise.
    """

    def __init__(self, folder: Path, model: Path, message: Message, repeat: int | None = None) -> None:
        self._folder, self._model_file, self._message, self._repeat = folder, model, message, repeat
        self._losses, self._first_loss = 0, 0.0
        self._module: nn.Module | None = None
        self._parts: list[nn.Module] = []  # that are called one behind the other, as an encoder and its decoder
        self._last_output: weakref.ref[Tensor] | None = None
        self._kept: nn.Module | None = None
        self._versions: dict[str, int] = {}  # of its parameters before the first step, by name
        self._is_keeper = not model.exists()
        self._batches: list[dict[str, Tensor]] = []
        self._kept_bytes, self._kept_examples, self._forwards = 0, 0, 0
        self._is_kept = False  # the last batch is the last one that is kept
        self._sizes: list[int] = []
        self._optimisers: dict[int, dict[str, Any]] = {}  # by identity
        self._second_order = 0  # gradients that were computed to be differentiated again
        self._range: tuple[float, float] | None = None  # of the values of pictures as they enter
        self._evaluated: list[dict[str, Tensor]] = []
        self._evaluation: dict[str, Tensor] | None = None  # a batch that no gradient was asked for, before its loss
        self._outputs: list[tuple[str, Tensor]] = []  # of the last call
        self._unlinked: Tensor | None = None  # input of the first loss, where the network itself computes it
        self._labels: Counter[int] = Counter()
        self._examples: set[bytes] = set()  # digests of what entered, so that one that enters twice counts once
        self._loss: dict[str, Any] = {}
        self._private: list[tuple[Any, dict[str, Any]]] = []  # Opacus' optimisers
        self._passes: list[dict[str, Any]] = []  # that batches of the training came from
        self._steps_on_batch: Counter[tuple[int, int]] = Counter()  # by pass and batch
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        global _watch
        _watch = self
        if self._repeat is not None:
            _seed(0)
        return self

    def __exit__(self, *_: object) -> None:
        global _watch
        _watch = None
        self.see(self._keep_evaluated)

    def see_call(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep the batch of a module with weights that is called from outside of any other.

        Args:
            module: That is called.
            arguments: Of the call.
            keywords: Of the call, by name.
        """
        tensors, self._outputs = dict(named_tensors([*arguments, keywords])), []
        last_output = None if self._last_output is None else self._last_output()
        is_next_part = last_output is not None and len(tensors) == 1 and arguments[0] is last_output
        if not module.training or not torch.is_grad_enabled():
            self._evaluation = self._evaluation if is_next_part else tensors
            return
        self._evaluation = None
        self._parts = [*self._parts, module] if is_next_part and self._module is not None else [module]
        begins, self._module = self._module is None, module
        if len(self._parts) > 1:
            self._module = nn.Sequential(*self._parts)
            if not self._losses:
                self._keep_model(self._module)
            return
        if begins:
            self._keep_model(module)
        self._forwards += 1
        last_pass, examples = current_pass(), main_input(tensors)
        if last_pass is not None and not any(loader_pass is last_pass for loader_pass in self._passes):
            self._passes.append(last_pass)
        self._sizes.append(0 if examples is None else len(examples))
        new = {digest(example) for example in (() if examples is None else examples)} - self._examples
        self._examples |= new
        for tensor in tensors.values():
            if tensor.ndim == 4 and tensor.numel():
                values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLED)].cpu().float().numpy()
                low, high = np.quantile(values, OUTLIERS), np.quantile(values, 1 - OUTLIERS)  # as of erased parts
                lowest, highest = self._range or (low, high)
                self._range = (min(float(low), float(lowest)), max(float(high), float(highest)))
        size = sum(tensor.nbytes for tensor in tensors.values())
        has_room = self._kept_examples < KEPT_EXAMPLES and self._kept_bytes + size <= KEPT_BYTES
        self._is_kept = has_room and (bool(new) or not self._batches)
        if self._is_kept:
            self._batches.append({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
            self._kept_bytes, self._kept_examples = self._kept_bytes + size, self._kept_examples + len(new)

    def see_output(self, output: Any) -> None:
        """Keep what a call returned until its loss is computed.

        Args:
            output: Of the call that was seen last.
        """
        self._outputs = [(name, tensor.detach()) for name, tensor in named_tensors(output, "output")]
        self._last_output = weakref.ref(output) if isinstance(output, Tensor) else None
        if self._unlinked is not None:
            self._loss["link"], self._unlinked = find_link(self._outputs, self._unlinked), None

    def see_loss(
        self, function: Callable[..., Any], value: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Note a loss that was computed of outputs and targets.

        Args:
            function: Of ``torch.nn.functional``.
            value: Of the loss.
            arguments: Of the call.
            keywords: Of the call, by name.
        """
        loss_input, target = (
            arguments[place] if len(arguments) > place else keywords.get(name)
            for place, name in enumerate(("input", "target"))
        )
        if self._evaluation is not None and not value.requires_grad:
            self._see_evaluated(target)
        if not torch.is_grad_enabled() or self._module is None or not self._module.training:
            return
        self._losses += 1
        self._first_loss = float(value.detach().mean()) if self._losses == 1 else self._first_loss
        if self._repeat and self._losses == _losses_before(self._folder):
            _seed(self._repeat)
        if not self._loss:
            self._loss = describe_loss(function.__name__, function, arguments, keywords)
            if isinstance(loss_input, Tensor):
                self._loss |= {"link": find_link(self._outputs, loss_input), "shape": list(loss_input.shape)}
                self._unlinked = None if self._outputs else loss_input.detach()
        if isinstance(target, Tensor):
            self._count_labels(target)
            if self._is_kept:
                self._batches[-1].setdefault("target", target.detach().cpu().clone())

    def _count_labels(self, target: Tensor) -> None:
        """Count the classes of a batch with one label for each example; two where the labels are zeros and ones."""
        shares = target if target.ndim > 1 else target[..., None]
        if not self._sizes or len(target) != self._sizes[-1] or shares[0].numel() != shares.shape[-1]:
            return
        is_distribution = bool((shares >= 0).all() and (shares.sum(-1) - 1).abs().max() < TOTAL)
        classes = shares.argmax(-1) if is_distribution and shares.shape[-1] > 1 else shares.flatten()
        if len(classes) == len(target) and bool((classes == classes.round()).all()):
            self._labels.update(classes.long().tolist())

    def _see_evaluated(self, target: Any) -> None:
        """Keep a batch that the app evaluates with, beside its target."""
        batch, self._evaluation = self._evaluation or {}, None
        examples = main_input(batch)
        if isinstance(target, Tensor) and examples is not None:
            batches = {name: tensor.detach().cpu().clone() for name, tensor in {**batch, "target": target}.items()}
            size = sum(tensor.nbytes for stored in [*self._evaluated, batches] for tensor in stored.values())
            count = sum(len(stored["target"]) for stored in self._evaluated)
            if count < KEPT_EVALUATED and size <= KEPT_EVALUATED_BYTES:
                self._evaluated.append(batches)

    def see_second_order(self) -> None:
        """Note gradients that are part of the loss, as a gradient penalty is."""
        self._second_order += 1

    def see_step(self, optimiser: torch.optim.Optimizer) -> None:
        """Note an optimiser that is about to take a step.

        Args:
            optimiser: Before its step.
        """
        last_pass = current_pass()
        self._steps_on_batch[len(self._passes), last_pass["batches"] if last_pass else 0] += 1
        for private, stated in self._private:
            stated["noise_multiplier"] = min(stated["noise_multiplier"], float(private.noise_multiplier))
        if id(optimiser) not in self._optimisers:
            self._private += private_optimisers(optimiser)
            self._optimisers[id(optimiser)] = {
                "object": optimiser,
                "name": type(optimiser).__name__,
                "is_of_torch": type(optimiser).__module__.startswith("torch.optim"),
                "is_new": not any(optimiser.state.values()),
                "steps": [],
            }
        steps = self._optimisers[id(optimiser)]["steps"]
        rules = [
            {name: float(group[name]) for name in RULE if isinstance(group.get(name), (int, float, Tensor))}
            for group in optimiser.param_groups
        ]
        if steps and steps[-1][1] == rules:
            steps[-1][0] += 1
        else:
            steps.append([1, rules])

    def see_solver(self, solver: Any, name: str, steps: int) -> None:
        """Note steps of a solver that is no optimiser of torch.

        Args:
            solver: With the parameters in its ``param_groups``.
            name: Of the solver.
            steps: That it took.
        """
        described = {"object": solver, "name": name, "is_of_torch": False, "is_new": True, "steps": [[steps, [{}]]]}
        self._optimisers[id(solver)] = described

    def _described_optimisers(self) -> list[dict[str, Any]]:
        """Describe the optimisers that took steps, their parameters by name; a step may begin before any call."""
        module = None if self._module is None else matching_part(self._module, self._message)
        names = {} if module is None else {id(value): name for name, value in module.named_parameters()}
        return [
            {
                **{name: value for name, value in described.items() if name != "object"},
                "groups": [
                    [names.get(id(value), "") for value in group["params"]]
                    for group in described["object"].param_groups
                ],
            }
            for described in self._optimisers.values()
        ]

    def keep(self, reply: Message) -> None:
        """Leave everything for the evaluator.

        Args:
            reply: The app's answer.
        """
        self.see(self._keep, reply)

    def see(self, look: Callable[..., object], *arguments: Any) -> None:
        """Look at what the app does; what goes wrong here is noted, and is no failure of the app's.

        Args:
            look: Method that notes something.
            arguments: Of the call.
        """
        try:
            look(*arguments)
        except Exception:  # noqa: BLE001 (the app's own work must not be lost by ours)
            settings.note(self._folder, "notes.jsonl", {"note": traceback.format_exc(limit=3)})

    def _keep(self, reply: Message) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = self._message.metadata.message_id
        np.savez(self._folder / f"{name}.npz", **_arrays(self._batches))
        entered = np.frombuffer(b"".join(sorted(self._examples)), np.uint8).reshape(-1, DIGEST_BYTES)
        np.save(self._folder / f"{name}-entered.npy", entered)
        module = None if self._module is None else matching_part(self._module, self._message)
        trained = {} if module is None else module.state_dict()
        np.savez(
            self._folder / f"{name}-trained.npz", **{entry: value.cpu().numpy() for entry, value in trained.items()}
        )
        settings.note(
            self._folder,
            "seen.jsonl",
            {
                "id": name,
                "node": self._message.metadata.dst_node_id,
                "error": reply.has_error(),
                "model": None if self._module is None else type(self._module).__name__,
                "forwards": self._forwards,
                "sizes": self._sizes,
                "examples": len(self._examples),
                "losses": self._losses,
                "labels": self._labels,
                "first_loss": self._first_loss,
                "repeat": self._repeat,
                "optimisers": self._described_optimisers(),
                "moved": self._moved(),
                "loss": self._loss,
                "normalisations": normalisations(),
                "range": self._range,
                "second_order": self._second_order,
                "change": None if module is None else change_sent(module, self._message, reply),
                "opacus": [stated for _, stated in self._private],
                "passes": self._described_passes(),
                "steps_on_batch": max(self._steps_on_batch.values(), default=0),
                "seconds": round(time.monotonic() - self._started, 2),
            },
        )

    def _keep_evaluated(self) -> None:
        """Keep what the client evaluated with, once for each client."""
        path = self._folder / f"evaluated-{self._message.metadata.dst_node_id}.npz"
        if self._evaluated and not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            np.savez(path, **_arrays(self._evaluated))

    def _moved(self) -> list[str]:
        """Name the parameters of the kept network that were written to since its first call, as steps do."""
        parameters = () if self._kept is None else self._kept.named_parameters()
        return [name for name, value in parameters if value._version != self._versions.get(name)]

    def _described_passes(self) -> list[dict[str, Any]]:
        """Describe the passes over loaders, one line for all that draw alike."""
        counts = Counter((entry["sampler"], entry["replaces"], entry["rate"]) for entry in self._passes)
        return [
            {"sampler": sampler, "replaces": replaces, "rate": rate, "passes": count}
            for (sampler, replaces, rate), count in counts.items()
        ]

    def _keep_model(self, module: nn.Module) -> None:
        """Keep the network as the client found it, before its first step, if nobody kept it before."""
        part = matching_part(module, self._message)
        # A part with all parameters is a network in a wrapper; a small one is the trained part of a network.
        self._kept = part if 2 * count_values(part) > count_values(module) else module
        self._versions = {name: value._version for name, value in self._kept.named_parameters()}
        if not self._is_keeper:
            return
        bare = copy.deepcopy(self._kept)
        for part in bare.modules():
            for name, value in vars(part).items():
                if name.endswith("_hooks") and isinstance(value, dict):
                    value.clear()
        self._model_file.parent.mkdir(parents=True, exist_ok=True)
        is_of_script = any(type(part).__module__ == "__main__" for part in bare.modules())  # no import finds its class
        pickling = pickle if not is_of_script else importlib.import_module("ray.cloudpickle")
        try:
            torch.save(bare.cpu(), self._model_file, pickle_module=pickling)
        except Exception as error:  # noqa: BLE001 (somebody else's classes)
            self._model_file.unlink(missing_ok=True)
            settings.note(self._folder, "notes.jsonl", {"note": f"the model cannot be kept: {error}"})


def current_watch() -> MessageWatch | None:
    """Return the watch of the message that this process answers; None outside of one."""
    return _watch


def watch_torch() -> None:
    """Put the patches in place, once."""
    global _patched
    if _patched:
        return
    _patched = True
    kind: Any = nn.Module
    kind.__call__ = _seen_call(kind.__call__)
    for name in LOSSES:
        setattr(F, name, _seen_loss(getattr(F, name)))
    register_optimizer_step_pre_hook(_seen_step)
    autograd: Any = torch.autograd
    autograd.grad = _seen_gradient(autograd.grad)
    watch_sampling()


def _seen_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        global _depth
        counted = next(module.parameters(), None) is not None
        outermost = _watch if _depth == 0 and counted else None
        if outermost is not None:
            outermost.see(outermost.see_call, module, arguments, keywords)
        _depth += counted
        try:
            output = original(module, *arguments, **keywords)
        finally:
            _depth -= counted
        if outermost is not None:
            outermost.see(outermost.see_output, output)
        return output

    return call


def _seen_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def loss(*arguments: Any, **keywords: Any) -> Any:
        value = original(*arguments, **keywords)
        if _watch is not None:
            _watch.see(_watch.see_loss, original, value, arguments, keywords)
        return value

    return loss


def _seen_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def gradient(*arguments: Any, **keywords: Any) -> Any:
        if _watch is not None and keywords.get("create_graph"):
            _watch.see_second_order()
        return original(*arguments, **keywords)

    return gradient


def _seen_step(optimiser: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
    if _watch is not None:
        _watch.see(_watch.see_step, optimiser)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: TID251, NPY002 (apps draw from the global generators)
    torch.manual_seed(number)  # noqa: TID251


def _arrays(batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Name the arrays of batches by their places, as files hold them."""
    return {
        f"{place}/{entry}": tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
        for place, batch in enumerate(batches)
        for entry, tensor in batch.items()
    }


def _losses_before(folder: Path) -> int | None:
    """Return how many losses the first repeat computed."""
    lines = [json.loads(line) for line in (folder / "seen.jsonl").read_text(encoding="utf-8").splitlines()]
    return next((int(line["losses"]) for line in reversed(lines) if line["repeat"] == 0), None)
