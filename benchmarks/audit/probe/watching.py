"""What torch does while an app's client trains: its batches, labels, model, optimiser and steps, by patches of torch.

Nothing of the app is changed: calls go on to what they were made to. The patches stand before the app is imported, so
that names which it takes out of torch are the patched ones.
"""

import copy
import gc
import hashlib
import json
import math
import random
import sys
import time
import traceback
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
from torch.utils import data
from torch.utils.data import dataloader

from . import settings

KEPT_EXAMPLES = 64  # of one training message
KEPT_BYTES = 2**28
SAMPLED, OUTLIERS = 100_000, 0.002  # values of a batch that its range is read from, and the share that it may leave out
LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss")
# An answer is a change of the weights from this cosine on; noise lengthens it, and rounding, but nothing else does.
ALONG, LONGER = 0.3, 1.2
WEIGHTS = 0.5  # relative distance from what was sent up to which an answer is weights
ALIKE = 0.99  # cosine with the last gradient from which on an answer is a multiple of it
RULE = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "eps")  # of a parameter group, in each step

_watch: "MessageWatch | None" = None
_normalisations: list[tuple[list[float], list[float]]] = []
_pass: dict[str, Any] | None = None  # over the loader that was iterated last: its sampling, and batches so far
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
        self._batches: list[dict[str, Tensor]] = []
        self._kept_bytes, self._kept_examples, self._forwards = 0, 0, 0
        self._sizes: list[int] = []
        self._optimisers: dict[int, dict[str, Any]] = {}  # by identity
        self._second_order = 0  # gradients that were computed to be differentiated again
        self._range: tuple[float, float] | None = None  # of the values of pictures as they enter
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

    def see_call(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep the batch of a module with weights that is called from outside of any other.

        Args:
            module: That is called.
            arguments: Of the call.
            keywords: Of the call, by name.
        """
        if not module.training or not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return
        if self._module is None:
            self._keep_model(module)
        self._module = module
        self._forwards += 1
        if _pass is not None and not any(loader_pass is _pass for loader_pass in self._passes):
            self._passes.append(_pass)
        tensors = dict(_tensors([*arguments, keywords]))
        inputs = [tensor for tensor in tensors.values() if tensor.ndim > 1] or list(tensors.values())
        self._sizes.append(len(inputs[0]) if inputs and inputs[0].ndim else 0)
        self._examples |= {_digest(example) for example in (inputs[0] if inputs and inputs[0].ndim else ())}
        for tensor in tensors.values():
            if tensor.ndim == 4 and tensor.numel():
                values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLED)].cpu().float().numpy()
                low, high = np.quantile(values, OUTLIERS), np.quantile(values, 1 - OUTLIERS)  # as of erased parts
                lowest, highest = self._range or (low, high)
                self._range = (min(float(low), float(lowest)), max(float(high), float(highest)))
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._kept_examples < KEPT_EXAMPLES and self._kept_bytes + size <= KEPT_BYTES:
            self._batches.append({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
            self._kept_bytes, self._kept_examples = self._kept_bytes + size, self._kept_examples + self._sizes[-1]

    def see_loss(self, name: str, value: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Note a loss that was computed of outputs and targets.

        Args:
            name: Of the loss function.
            value: Of the loss.
            arguments: Of the call.
            keywords: Of the call, by name.
        """
        if not torch.is_grad_enabled() or self._module is None or not self._module.training:
            return
        self._losses += 1
        self._first_loss = float(value.detach().mean()) if self._losses == 1 else self._first_loss
        if self._repeat and self._losses == _losses_before(self._folder):
            _seed(self._repeat)
        target = arguments[1] if len(arguments) > 1 else keywords.get("target")
        if not self._loss:
            smoothing = keywords.get("label_smoothing", 0.0)
            self._loss = {
                "name": name,
                "label_smoothing": float(smoothing),
                "reduction": keywords.get("reduction", "mean"),
            }
        if isinstance(target, Tensor) and self._batches and len(self._batches) == len(self._sizes):
            self._batches[-1].setdefault("target", target.detach().cpu().clone())

    def see_second_order(self) -> None:
        """Note gradients that are part of the loss, as a gradient penalty is."""
        self._second_order += 1

    def see_step(self, optimiser: torch.optim.Optimizer) -> None:
        """Note an optimiser that is about to take a step.

        Args:
            optimiser: Before its step.
        """
        self._steps_on_batch[len(self._passes), _pass["batches"] if _pass else 0] += 1
        for private, stated in self._private:
            stated["noise_multiplier"] = min(stated["noise_multiplier"], float(private.noise_multiplier))
        if id(optimiser) not in self._optimisers:
            self._private += _opacus(optimiser)
            self._optimisers[id(optimiser)] = {"object": optimiser, **self._described(optimiser)}
        steps = self._optimisers[id(optimiser)]["steps"]
        rules = [
            {name: float(group[name]) for name in RULE if isinstance(group.get(name), (int, float, Tensor))}
            for group in optimiser.param_groups
        ]
        if steps and steps[-1][1] == rules:
            steps[-1][0] += 1
        else:
            steps.append([1, rules])

    def _described(self, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
        """Describe an optimiser before its first step in this message."""
        module = None if self._module is None else _matching(self._module, self._message)
        names = {} if module is None else {id(value): name for name, value in module.named_parameters()}
        groups = [[names.get(id(value), "") for value in group["params"]] for group in optimiser.param_groups]
        return {
            "name": type(optimiser).__name__,
            "is_of_torch": type(optimiser).__module__.startswith("torch.optim"),
            "is_new": not any(optimiser.state.values()),
            "groups": groups,
            "steps": [],
        }

    def keep(self, reply: Message) -> None:
        """Leave everything for the evaluator.

        Args:
            reply: The app's answer.
        """
        self.see(self._keep, reply)

    def see(self, look: Callable[..., None], *arguments: Any) -> None:
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
        arrays: dict[str, Any] = {
            f"{place}/{entry}": tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
            for place, batch in enumerate(self._batches)
            for entry, tensor in batch.items()
        }
        np.savez(self._folder / f"{name}.npz", **arrays)
        module = None if self._module is None else _matching(self._module, self._message)
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
                "first_loss": self._first_loss,
                "repeat": self._repeat,
                "optimisers": [
                    {name: value for name, value in described.items() if name != "object"}
                    for described in self._optimisers.values()
                ],
                "loss": self._loss,
                "normalisations": [*_normalisations, *_of_processors()],
                "range": self._range,
                "second_order": self._second_order,
                "change": None if module is None else _change_sent(module, self._message, reply),
                "opacus": [stated for _, stated in self._private],
                "passes": self._described_passes(),
                "steps_on_batch": max(self._steps_on_batch.values(), default=0),
                "seconds": round(time.monotonic() - self._started, 2),
            },
        )

    def _described_passes(self) -> list[dict[str, Any]]:
        """Describe the passes over loaders, one line for all that draw alike."""
        alike = Counter((entry["sampler"], entry["replaces"], entry["rate"]) for entry in self._passes)
        return [
            {"sampler": sampler, "replaces": replaces, "rate": rate, "passes": count}
            for (sampler, replaces, rate), count in alike.items()
        ]

    def _keep_model(self, module: nn.Module) -> None:
        """Keep the network as the client found it, before its first step, if nobody kept it before."""
        if self._model_file.exists():
            return
        part = _matching(module, self._message)
        # A part that is most of the module is a network in a wrapper; a small one is the trained part of a network.
        bare = copy.deepcopy(part if 2 * _count_values(part) > _count_values(module) else module)
        for part in bare.modules():
            for name, value in vars(part).items():
                if name.endswith("_hooks") and isinstance(value, dict):
                    value.clear()
        self._model_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(bare.cpu(), self._model_file)
        except Exception as error:  # noqa: BLE001 (somebody else's classes)
            self._model_file.unlink(missing_ok=True)
            settings.note(self._folder, "notes.jsonl", {"note": f"the model cannot be kept: {error}"})


def watch_torch() -> None:
    """Put the patches in place, once."""
    global _patched
    if _patched:
        return
    _patched = True
    kind: Any = nn.Module
    kind.__call__ = _seen_call(kind.__call__)
    for name in LOSSES:
        setattr(F, name, _seen_loss(name, getattr(F, name)))
    register_optimizer_step_pre_hook(_seen_step)
    autograd: Any = torch.autograd
    autograd.grad = _seen_gradient(autograd.grad)
    loader: Any = data.DataLoader
    loader.__iter__ = _seen_pass(loader.__iter__)
    iterator: Any = dataloader._BaseDataLoaderIter
    iterator.__next__ = _seen_batch(iterator.__next__)
    _see_normalisations()


def _seen_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        global _depth
        if _watch is not None and _depth == 0:
            _watch.see(_watch.see_call, module, arguments, keywords)
        counted = next(module.parameters(), None) is not None
        _depth += counted
        try:
            return original(module, *arguments, **keywords)
        finally:
            _depth -= counted

    return call


def _seen_loss(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def loss(*arguments: Any, **keywords: Any) -> Any:
        value = original(*arguments, **keywords)
        if _watch is not None:
            _watch.see(_watch.see_loss, name, value, arguments, keywords)
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


def _seen_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def iterate(loader: Any) -> Any:
        global _pass
        batches = original(loader)
        sampler = loader.batch_sampler or loader.sampler
        while type(sampler).__name__ in ("BatchSampler", "BatchSplittingSampler"):  # the latter is Opacus'
            sampler = sampler.sampler
        _pass = {
            "sampler": type(sampler).__name__,
            "replaces": bool(getattr(sampler, "replacement", False)),
            "rate": getattr(sampler, "sample_rate", None),
            "batches": 0,
        }
        batches._fedmjp_pass = _pass
        return batches

    return iterate


def _seen_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def draw(batches: Any) -> Any:
        global _pass
        batch = original(batches)
        _pass = getattr(batches, "_fedmjp_pass", None)
        if _pass is not None:
            _pass["batches"] += 1
        return batch

    return draw


def _see_normalisations() -> None:
    try:
        from torchvision import transforms  # noqa: PLC0415 (apps without pictures may lack it)
        from torchvision.transforms import _presets, v2  # noqa: PLC0415
    except ImportError:
        return
    for kind in (transforms.Normalize, v2.Normalize, _presets.ImageClassification):
        kind.__init__ = _seen_statistics(kind.__init__)


def _seen_statistics(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def initialise(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        _normalisations.append(([float(value) for value in self.mean], [float(value) for value in self.std]))

    return initialise


def _of_processors() -> list[tuple[list[float], list[float]]]:
    """List what image processors of transformers normalise with."""
    if "transformers" not in sys.modules:
        return []
    processors = [
        processor
        for processor in gc.get_objects()
        if "ImageProcessor" in type(processor).__name__ and hasattr(processor, "image_mean")
    ]
    return [
        (list(processor.image_mean), list(processor.image_std))
        for processor in processors
        if getattr(processor, "image_mean", None)
    ]


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: TID251, NPY002 (apps draw from the global generators)
    torch.manual_seed(number)  # noqa: TID251


def _losses_before(folder: Path) -> int | None:
    """Return how many losses the first repeat computed."""
    lines = [json.loads(line) for line in (folder / "seen.jsonl").read_text(encoding="utf-8").splitlines()]
    return next((int(line["losses"]) for line in reversed(lines) if line["repeat"] == 0), None)


def _opacus(stepping: torch.optim.Optimizer) -> list[tuple[Any, dict[str, Any]]]:
    """List Opacus' optimisers around one that is about to step, each with its own statements."""
    if "opacus" not in sys.modules:
        return []
    names = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
    optimisers = [
        optimiser
        for optimiser in gc.get_objects()
        if type(optimiser).__name__.startswith("DP") and getattr(optimiser, "original_optimizer", None) is stepping
    ]
    return [
        (optimiser, {**{name: getattr(optimiser, name, None) for name in names}, "measured_noise": _noise(optimiser)})
        for optimiser in optimisers
    ]


def _noise(optimiser: Any) -> float | None:
    """Measure the standard deviation of the noise that Opacus added to a sum of gradients, before its step."""
    expected = float(optimiser.expected_batch_size or 1)
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    added = [
        (parameter.grad * expected - parameter.summed_grad).flatten()
        for parameter in parameters
        if parameter.grad is not None and getattr(parameter, "summed_grad", None) is not None
    ]
    return float(torch.cat(added).std()) if added else None


def _digest(example: Tensor) -> bytes:
    return hashlib.blake2b(example.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).digest()


def _tensors(values: Any, name: str = "input") -> list[tuple[str, Tensor]]:
    if isinstance(values, Tensor):
        return [(name, values)]
    if isinstance(values, list | tuple):
        return [pair for place, value in enumerate(values) for pair in _tensors(value, f"{name}-{place}")]
    if hasattr(values, "items"):
        return [pair for key, value in values.items() for pair in _tensors(value, f"{name}-{key}")]
    return []


def _change_sent(module: nn.Module, message: Message, reply: Message) -> int | None:
    """Tell whether an answer is the change of the weights: 1, or -1 if its sign is the opposite.

    What is shorter than the change, or noisy, is still one; a gradient has another length or direction. 0 if it is
    neither that nor a multiple of the last gradient; None if nobody can tell.
    """
    if reply.has_error():
        return None
    state = {name: value.cpu() for name, value in module.state_dict().items() if value.is_floating_point()}
    parameters = dict(module.named_parameters())
    sent, answered = (_named(content, state, parameters) for content in (message.content, reply.content))
    names = [name for name in answered if name in sent]
    if not names:
        return None
    arrays, start, trained = (
        torch.cat([values[name].double().flatten() for name in names]) for values in (answered, sent, state)
    )
    if float((arrays - start).norm()) <= WEIGHTS * float(start.norm()):
        return None
    gradients = [parameters[name].grad if name in parameters else None for name in names]
    change = trained - start
    length = float(arrays.norm() * change.norm())
    cosine = float(arrays @ change) / length if length else 0.0
    is_change = abs(cosine) >= ALONG and float(arrays.norm()) <= LONGER * float(change.norm()) / abs(cosine)
    is_gradient = None
    if all(gradient is not None for gradient in gradients):
        gradient = torch.cat([value.detach().cpu().double().flatten() for value in gradients if value is not None])
        is_gradient = bool(arrays @ gradient >= ALIKE * arrays.norm() * gradient.norm())
        if is_change and (arrays - gradient).norm() < (arrays - math.copysign(1, cosine) * change).norm():
            return None
    if is_change:
        return 1 if cosine > 0 else -1
    return 0 if is_gradient is False else None


def _named(content: Any, state: dict[str, Tensor], parameters: dict[str, Any]) -> dict[str, Tensor]:
    """Name floating-point arrays as a network does: by name, else in the order of its state or of its parameters."""
    arrays = {name: array.numpy() for record in content.array_records.values() for name, array in record.items()}
    floating = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items() if array.dtype.kind == "f"}
    shapes = [tuple(value.shape) for value in floating.values()]
    for names in (list(floating), list(state), list(parameters)):
        if all(name in state for name in names) and shapes == [tuple(state[name].shape) for name in names]:
            return dict(zip(names, floating.values(), strict=True))
    return {}


def _count_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matching(module: nn.Module, message: Message) -> nn.Module:
    """Find the outermost part whose state is what the server sent, by shapes in order; else the module itself."""
    sent = [list(array.shape) for record in message.content.array_records.values() for array in record.values()]
    for part in module.modules():
        if [list(value.shape) for value in part.state_dict().values()] == sent:
            return part
    return module
