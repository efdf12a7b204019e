"""The server's evaluation on a public validation split: the only pictures that it opens."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import evaluation_batches
from fedmjp.learning import Recipe
from fedmjp.models.classifier import Classifier
from fedmjp.scenario import Scenario
from fedmjp.training.accuracy import Accuracy, top1


class Validation:
    """Holds the validation split and a model to evaluate weights with.

    Args:
        model: Of the configuration.
        scenario: Names data and device.
        recipe: Of the evaluation.
        on_skipped: Told once of each picture that cannot be read; it is left out.

    Raises:
        DataError: If there is no validation split, or its labels do not fit the model.
    """

    def __init__(
        self, model: Classifier, scenario: Scenario, recipe: Recipe, on_skipped: Callable[[str], None]
    ) -> None:
        self._on_skipped, self._skipped = on_skipped, set[str]()
        self._model, self._recipe = model.to(torch.device(scenario.device)), recipe
        self._pictures = open_dataset(scenario.data, "validation", classes=scenario.model.classes)

    def accuracy(self, weights: Mapping[str, Tensor]) -> Accuracy:
        """Top-1 accuracy of weights."""
        recipe = self._recipe
        self._model.load_state_dict(dict(weights))
        batches = evaluation_batches(
            self._pictures,
            np.arange(len(self._pictures)),
            recipe.crop_share,
            size=self._model.image_size,
            batch_size=recipe.batch_size,
            workers=recipe.workers,
            on_skipped=self._skip,
        )
        return top1(self._model, batches)

    def _skip(self, reason: str) -> None:
        if reason not in self._skipped:
            self._skipped.add(reason)
            self._on_skipped(reason)
