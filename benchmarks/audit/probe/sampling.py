"""What an app trains with beside its network: passes over loaders, normalisations, optimisers of Opacus."""

import gc
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import dataloader

_pass: dict[str, Any] | None = None  # over the loader that was iterated last: its sampling, and batches so far
_normalisations: list[tuple[list[float], list[float]]] = []


def current_pass() -> dict[str, Any] | None:
    """Return the pass over the loader that gave the last batch: its sampling, and batches so far."""
    return _pass


def normalisations() -> list[tuple[list[float], list[float]]]:
    """List mean and standard deviation of each normalisation that the app made."""
    return [*_normalisations, *_of_processors()]


def watch_sampling() -> None:
    """Patch loaders and normalisations; the caller sees to it that this happens once."""
    loader: Any = data.DataLoader
    loader.__iter__ = _seen_pass(loader.__iter__)
    iterator: Any = dataloader._BaseDataLoaderIter
    iterator.__next__ = _seen_batch(iterator.__next__)
    _see_normalisations()


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
        batches._pass = _pass
        return batches

    return iterate


def _seen_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def draw(batches: Any) -> Any:
        global _pass
        batch = original(batches)
        _pass = getattr(batches, "_pass", None)
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


def private_optimisers(stepping: torch.optim.Optimizer) -> list[tuple[Any, dict[str, Any]]]:
    """List Opacus' optimisers around one that is about to step, each with its own statements.

    Args:
        stepping: The optimiser inside of them.
    """
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
