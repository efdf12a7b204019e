"""The server's evaluation on a public validation split: the only pictures that it opens."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from fedmjp.data.datasets import open_dataset
from fedmjp.learning import Recipe
from fedmjp.models.classifier import Classifier
from fedmjp.scenario import AnyScenario
from fedmjp.training.accuracy import Accuracy, validate


class Validation:
    """Holds the validation split and a model to evaluate weights with; pictures that cannot be read are told once.

    Args:
        model: Which weights are put into.
        scenario: Names the data.
        recipe: How pictures are cropped and batched.
        class_names: Of the run, in the order of its labels; without them labels are taken as they are.
        on_skipped: Called with the reason for every picture that cannot be read, once each.

    Raises:
        DataError: If there is no validation split, its labels do not fit the model, or it has a class that is not
            among the names.
    """

    def __init__(
        self,
        model: Classifier,
        scenario: AnyScenario,
        recipe: Recipe,
        class_names: Sequence[str] = (),
        on_skipped: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._model, self._recipe = model.to(torch.device(scenario.device)), recipe
        pictures = open_dataset(scenario.data, "validation", classes=scenario.model.classes)
        self._pictures = pictures.labelled_as(class_names) if class_names else pictures
        self._on_skipped = cache(on_skipped)
        self._measured: tuple[Mapping[str, Tensor], Accuracy] | None = None

    def accuracy(self, weights: Mapping[str, Tensor]) -> Accuracy:
        """Measure the Top-1 accuracy of weights; those of the last call are not measured again.

        Args:
            weights: The model's state by name; must not be changed in place.
        """
        if self._measured is None or self._measured[0] is not weights:
            self._model.load_state_dict(dict(weights))
            measured = validate(self._model, self._pictures, self._recipe, self._on_skipped)
            self._measured = weights, measured
        return self._measured[1]
