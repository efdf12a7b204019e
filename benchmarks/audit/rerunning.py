"""An app's own training, run again on records that are known: for controls, and for what fewer of them would tell."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmjp.benchmarks.audit.app_loss import AppLoss, Examples
from fedmjp.errors import BadInputError


def resize_recipe(recipe: Mapping[str, Any], examples: int, batch_size: int, passes: float) -> dict[str, Any]:
    """Describe the same training of fewer examples.

    Args:
        recipe: Of a client's training, with its groups of parameters.
        examples: Number of them, at least 1.
        batch_size: The largest batch.
        passes: Over the examples.
    """
    steps = -(-round(passes * examples) // batch_size)
    groups = [{**group, "is_new": True, "steps": [[steps, group["steps"][0][1]]]} for group in recipe["groups"]]
    return {
        **recipe, "steps": steps, "passes": passes, "forwards": steps, "examples": examples, "batch_size": batch_size,
        "groups": groups,
    }  # fmt: skip


def run_steps(module: nn.Module, examples: Examples, recipe: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """Run an app's own steps, as many passes in as large batches, and return the change of all that floats by name.

    Args:
        module: The app's, with the weights that the server sent; it stays as it is.
        examples: At least one.
        recipe: Of a client's training: loss, optimisers with their first rules, passes, batch size.
        kind: "gradient" for that of one batch of all examples in place of a change.

    Raises:
        BadInputError: If the optimisers are not torch's, or several, or the loss cannot be computed.
    """
    trained = copy.deepcopy(module).train()
    loss, parameters = AppLoss(trained, recipe["loss"]), dict(trained.named_parameters())
    is_sum = recipe["loss"]["reduction"] == "sum"
    if kind == "gradient":
        return {name: (len(examples) if is_sum else 1) * value for name, value in loss.gradient(examples).items()}
    groups = recipe.get("groups", ())
    kinds = {group["optimiser"] for group in groups}
    if len(kinds) != 1 or not all(group["is_known"] for group in groups):
        raise BadInputError("the app's optimisers are not torch's, or several")
    members = [[parameters[name] for name in group["names"] if name in parameters] for group in groups]
    for parameter in parameters.values():
        parameter.requires_grad_(any(parameter is member for group in members for member in group))
    parts = [{"params": group, **rules["steps"][0][1]} for group, rules in zip(members, groups, strict=True) if group]
    optimiser: torch.optim.Optimizer = getattr(torch.optim, kinds.pop())(parts, lr=0.01)
    size = min(recipe["batch_size"], len(examples))
    for place in range(0, round(recipe["passes"] * len(examples)), size):
        batch = examples[[number % len(examples) for number in range(place, place + size)]]
        optimiser.zero_grad()
        torch.autograd.backward((len(batch) if is_sum else 1) * loss.of_batch(batch).mean())
        optimiser.step()
    state = module.state_dict()
    return {
        name: value.detach() - state[name] for name, value in trained.state_dict().items() if value.is_floating_point()
    }
