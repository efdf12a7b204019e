"""Checks on the model that came in, right before the first step of training with it.

What they compare with from round to round lies in a private folder beside the ledger, for its owner alone: the weights
of the last round, the client's own update in it, a few of its pictures, and what was measured before.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from fedmjp.clients.checks import Finding, Incoming, examine_model, remember
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.gate.reading import ReplyReading
from fedmjp.clients.gate.watching import Observation
from fedmjp.clients.replies import SentArrays
from fedmjp.errors import RecordError
from fedmjp.records import load_tensors, save_tensors

PICTURES = 8  # that models are run on: of fewer, units are alone by chance; of more, the checks cost more


class ModelChecks:
    """The checks of one message, and what they keep for the next one.

    Args:
        policy: Of the site.
        ledger: Beside which the private folder lies.
        node: Of the message.
        run: Of the message; what was kept of other runs is of other models.
    """

    def __init__(self, policy: Policy, ledger: Path, node: int, run: int) -> None:
        self.findings: list[Finding] = []
        self._policy = policy
        self._folder = ledger.with_name(ledger.name + ".private")
        self._path = self._folder / f"{node}.safetensors"
        self._run = run
        self._kept: dict[str, Tensor] = {}
        self._history: Mapping[str, Sequence[float]] = {}

    def examine(self, observed: Observation, sent: SentArrays, config: Mapping[str, object]) -> list[Finding]:
        """Examine the module that is trained, whose weights are still those that came in.

        Args:
            observed: What was seen of the training so far.
            sent: The arrays that came in.
            config: The server's settings.

        Returns:
            The suspicious findings.
        """
        self._load()
        module = observed.module
        weights = None if module is None else _named(module, sent)
        if module is None or weights is None or not observed.images or not observed.labels:
            self.findings = []
            return []
        images = self._kept.get("images", observed.images[0][:PICTURES].cpu())
        labels = self._kept.get("labels", observed.labels[0][:PICTURES].cpu())
        if images.shape[1:] != observed.images[0].shape[1:]:
            images, labels = observed.images[0][:PICTURES], observed.labels[0][:PICTURES]
        device = observed.images[0].device
        self.findings = examine_model(
            Incoming(
                model=module,
                weights=weights,
                previous=self._part("previous"),
                update=self._part("update"),
                images=images.to(device),
                labels=labels.to(device),
                history=self._history,
                config=config,
                bounds=self._policy.bounds,
            )
        )
        self._history = remember(self._history, self.findings)
        self._kept = {"images": images.cpu(), "labels": labels.cpu()}
        self._kept |= {f"previous/{name}": tensor for name, tensor in weights.items()}
        return [finding for finding in self.findings if finding.suspicious]

    def keep(self, reading: ReplyReading) -> None:
        """Keep this round for the next one, once it is known what leaves.

        Args:
            reading: Of the reply that leaves.
        """
        names = [name.removeprefix("previous/") for name in self._kept if name.startswith("previous/")]
        if not names:
            return
        moved: dict[str, Tensor] = {}
        for update, *_ in reading.updates:
            sign, change = -1.0 if update.kind == "gradient" else 1.0, update.change
            # A reply without names has the order of the model's own.
            unnamed = dict(zip(names, change, strict=True)) if len(names) == len(change) else {}
            keys = {name: name for name in names} if change.keys() >= set(names) else unnamed
            moved |= {f"update/{name}": sign * change[key] for name, key in keys.items() if name not in moved}
        moved = {name: tensor for name, tensor in moved.items() if tensor.is_floating_point()}
        self._folder.mkdir(mode=0o700, exist_ok=True)
        fields = {"run": self._run, "history": json.dumps({name: list(v) for name, v in self._history.items()})}
        save_tensors(self._path, {**self._kept, **moved}, fields)

    def _load(self) -> None:
        if not self._path.exists():
            return
        try:
            tensors, fields = load_tensors(self._path)
        except RecordError:
            return  # of a crash: as if it were the first round
        if fields.get("run") == self._run:
            self._kept, self._history = tensors, json.loads(fields["history"])

    def _part(self, part: str) -> dict[str, Tensor] | None:
        begin = f"{part}/"
        tensors = {name.removeprefix(begin): tensor for name, tensor in self._kept.items() if name.startswith(begin)}
        return tensors or None


def _named(module: nn.Module, sent: SentArrays) -> dict[str, Tensor] | None:
    """Name the weights that were sent as the module does, in its precision; None where some are missing."""
    state = module.state_dict()
    for weights in sent.weights:
        by_name = weights if weights.keys() == state.keys() else dict(zip(state, weights.values(), strict=False))
        if len(weights) == len(state) and all(by_name[name].shape == tensor.shape for name, tensor in state.items()):
            return {name: _as_held(by_name[name], tensor) for name, tensor in state.items()}
    return None


def _as_held(tensor: Tensor, module_tensor: Tensor) -> Tensor:
    return (
        tensor.to(module_tensor.dtype) if tensor.is_floating_point() and module_tensor.is_floating_point() else tensor
    )
