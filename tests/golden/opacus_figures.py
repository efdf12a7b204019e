"""Figures of Opacus, to hold our accounting and our clipping against.

Opacus' wheel installs a package called ``benchmarks``, like ours, so the two cannot live in one environment. Run it in
an environment of its own with ``pip install opacus==1.6.0``: ``python tests/golden/opacus_figures.py``.
"""

import json
from pathlib import Path

import opacus
import torch
import torch.nn.functional as F
from opacus.accountants import PRVAccountant, RDPAccountant

DELTA = 1e-5
CLASSIC = (2 * torch.tensor(1.25 / DELTA, dtype=torch.float64).log()).sqrt().item()  # of the classic Gaussian mechanism
CASES = [(CLASSIC, 1.0, 1), (CLASSIC, 1.0, 10), (CLASSIC, 1.0, 100), (1.0, 0.01, 1000), (4.0, 1.0, 5)]
NORM = 0.5


def main() -> None:
    figures = {
        "opacus": opacus.__version__,
        "torch": torch.__version__,
        "delta": DELTA,
        "accountants": [accounted(*case) for case in CASES],
        "dp_sgd": clipped(),
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def accounted(multiplier: float, rate: float, steps: int) -> dict[str, float]:
    found: dict[str, float] = {"multiplier": multiplier, "rate": rate, "steps": steps}
    for name, accountant in (("rdp", RDPAccountant()), ("prv", PRVAccountant())):
        accountant.history = [(multiplier, rate, steps)]
        found[name] = float(accountant.get_epsilon(DELTA))
    return found


def clipped() -> dict[str, object]:
    """The mean of the clipped gradients of six examples, without noise."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    weights = {name: torch.randn(value.shape, generator=generator) / 3 for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    inputs, labels = torch.randn(6, 12, generator=generator), torch.arange(6) % 4
    sampled = opacus.GradSampleModule(model)
    optimiser = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(sampled.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=6,
    )
    F.cross_entropy(sampled(inputs), labels).backward()
    optimiser.pre_step()
    gradient = {name: value.grad.tolist() for name, value in model.named_parameters() if value.grad is not None}
    weights_as_lists = {name: value.tolist() for name, value in weights.items()}
    shared = {"norm": NORM, "inputs": inputs.tolist(), "labels": labels.tolist()}
    return {**shared, "weights": weights_as_lists, "gradient": gradient}


if __name__ == "__main__":
    main()
