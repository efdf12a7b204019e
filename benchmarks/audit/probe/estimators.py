"""Logistic regressions of scikit-learn, watched as the linear layer of torch that computes the same.

What their solvers do is not seen, only that the weights moved: attacks on gradients refuse it, others take it.
"""

import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import watching

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
        watch, layers = watching.current_watch(), list[nn.Linear]()
        if watch is not None:
            watch.see(lambda: layers.append(_show(estimator, inputs, target)))
        fitted = original(estimator, inputs, target, *arguments, **keywords)
        if watch is not None and layers:
            watch.see(_finish, watch, estimator, layers[0])
        return fitted

    return fit


def _seen_score(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def score(estimator: Any, inputs: Any, target: Any, *arguments: Any, **keywords: Any) -> Any:
        if (watch := watching.current_watch()) is not None:
            with torch.no_grad():
                watch.see(_show, estimator, inputs, target)
        return original(estimator, inputs, target, *arguments, **keywords)

    return score


def _show(estimator: Any, inputs: Any, target: Any) -> nn.Linear:
    """Compute an estimator's loss before it is fitted by a layer of torch, so that all hooks see it."""
    records = torch.from_numpy(np.asarray(inputs, dtype=np.float32))
    classes = np.unique(np.asarray(getattr(estimator, "classes_", target)))
    labels = torch.from_numpy(np.searchsorted(classes, np.asarray(target)))
    rows = len(estimator.coef_) if hasattr(estimator, "coef_") else (len(classes) if len(classes) > 2 else 1)
    layer = nn.Linear(records.shape[1], rows, bias=bool(estimator.fit_intercept))
    _fill(layer, estimator)
    _loss(layer(records), labels)
    return layer


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.shape[1] > 1:
        return F.cross_entropy(outputs, labels)
    return F.binary_cross_entropy_with_logits(outputs.squeeze(1), labels.float())


def _fill(layer: nn.Linear, estimator: Any) -> None:
    """Give a layer an estimator's weights, which are zero before its first fit."""
    with torch.no_grad():
        for parameter, name in ((layer.weight, "coef_"), (layer.bias, "intercept_")):
            if parameter is not None:
                parameter.copy_(torch.from_numpy(np.array(getattr(estimator, name, 0.0), dtype=np.float32)))


def _finish(watch: watching.MessageWatch, estimator: Any, layer: nn.Linear) -> None:
    """Note the steps of an estimator's solver, and the weights that it came to."""
    solver = SimpleNamespace(param_groups=[{"params": list(layer.parameters())}])
    watch.see_solver(solver, f"scikit-learn's {estimator.solver}", int(np.max(estimator.n_iter_)))
    _fill(layer, estimator)
