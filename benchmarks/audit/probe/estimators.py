"""Logistic regressions of scikit-learn, watched as the linear layer of torch that computes the same.

What their solvers do is not seen, only that the weights moved: attacks on gradients refuse it, others take it.
"""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import watching

Weights = np.ndarray[Any, np.dtype[np.float32]]
WEIGHTS = ("coef_", "intercept_")

_patched = False


def watch_estimators() -> None:
    """Put the patches in place, once the app has imported scikit-learn's linear models."""
    global _patched
    linear_models: Any = sys.modules.get("sklearn.linear_model")
    if linear_models is None or _patched:
        return
    _patched = True
    kind = linear_models.LogisticRegression
    kind.fit, kind.score = _seen_fit(kind.fit), _seen_score(kind.score)


def _seen_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def fit(estimator: Any, inputs: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
        start = _weights_of(estimator)
        fitted = original(estimator, inputs, target, *arguments, **keywords)
        if (watch := watching.current_watch()) is not None:
            watch.see(_show_fit, watch, estimator, start, inputs, target)
        return fitted

    return fit


def _seen_score(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def score(estimator: Any, inputs: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
        if (watch := watching.current_watch()) is not None:
            with torch.no_grad():
                watch.see(_show, estimator, _weights_of(estimator), inputs, target)
        return original(estimator, inputs, target, *arguments, **keywords)

    return score


def _show(estimator: Any, weights: Mapping[str, Weights], inputs: Any, target: Any) -> nn.Linear:
    """Compute a fitted estimator's loss at some weights by a layer of torch, so that all hooks see it."""
    records = torch.from_numpy(np.asarray(inputs, dtype=np.float32))
    labels = torch.from_numpy(np.searchsorted(estimator.classes_, np.asarray(target)))
    layer = nn.Linear(records.shape[1], len(estimator.coef_), bias=bool(estimator.fit_intercept))
    _fill(layer, weights)
    _loss(layer(records), labels)
    return layer


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.shape[1] > 1:
        return F.cross_entropy(outputs, labels)
    return F.binary_cross_entropy_with_logits(outputs.squeeze(1), labels.float())


def _fill(layer: nn.Linear, weights: Mapping[str, Weights]) -> None:
    """Give a layer an estimator's weights, which are zero before its first fit."""
    with torch.no_grad():
        for parameter, name in zip((layer.weight, layer.bias), WEIGHTS, strict=True):
            if parameter is not None:
                parameter.copy_(torch.from_numpy(weights[name]))


def _show_fit(
    watch: watching.MessageWatch, estimator: Any, start: Mapping[str, Weights], inputs: Any, target: Any
) -> None:
    """Show a fit that is over: its records at the first weights, the steps of its solver, and what it came to.

    Repeats of a message draw other noise from the last loss on. A solver that draws its order is done before, so that
    its draws count as training and never as noise.
    """
    layer = _show(estimator, start, inputs, target)
    solver = SimpleNamespace(param_groups=[{"params": list(layer.parameters())}])
    watch.see_solver(solver, f"scikit-learn's {estimator.solver}", int(np.max(estimator.n_iter_)))
    _fill(layer, _weights_of(estimator))


def _weights_of(estimator: Any) -> dict[str, Weights]:
    """Copy an estimator's weights, zero where it has none yet."""
    return {name: np.array(getattr(estimator, name, 0.0), dtype=np.float32) for name in WEIGHTS}
