"""Which patches MJP masked, read off an upload: the one place where attacks find out.

Masked tokens carry the shared unknown embedding instead of their own position embedding, so the gradient of the
position embedding has rows of zeros there. A client's defences may hide them:

- *Nothing*, rounding and scaling leave zeros zero, and no other row becomes zero.
- *Noise* falls on zeros, too. Rows of masked places then hold noise alone, whose variance the server is told: the mean
  square of such a row exceeds that variance by a few of its standard deviations at most, more of them if the noise
  has long tails. Rows that exceed it by hardly more may be either. Where the noise drowns the rows, hardly any exceed
  it. Rows that hide below the bound give themselves away together: their mean is above the variance.
- *Pruning* empties rows that were not masked, as quantising to few levels does. Rows without any entry are masked if
  all others have many left.

Measured on untrained DeiT-Ti and DeiT-S at 64 and 224 pixels, mask ratios 0.1 to 0.5: tests/test_mask.py.
"""

import torch
from torch import Tensor

from fedmjp.attacks.base import on_device
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.entrance import Entrance
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

# Standard deviations of the mean square of noise by which a row may exceed its mean and still be noise alone, and by
# which it must exceed it to be more than noise.
SILENT, LOUD = 4.0, 8.0
# Share of the places that may be masked under noise: no mask of the paper hides more than half.
MOST = 0.75
# Entries that every row has left under pruning where none was emptied. Where one was, the fewest were six at most.
FEWEST = 10
NORMAL = 3.0  # kurtosis of normal noise; laws with longer tails have more


def mask_refusal(model: Entrance, threat: ThreatModel) -> str | None:
    """Say why no upload under this threat model shows its mask.

    Args:
        model: The model that the server had sent.
        threat: States the defences.

    Returns:
        The reason; None if an upload may show its mask, or nothing is masked.
    """
    if not model.defended:
        return None
    defences = threat.pipeline.defences
    on_zeros = [defence.name for defence in defences if "noisy" in defence.marks and "pruned" not in defence.marks]
    to_zeros = [defence.name for defence in defences if {"pruned", "signs"} & defence.marks]
    changed = [defence.name for defence in defences if "reshaped" in defence.marks]
    inside = [defence.name for defence in threat.pipeline.by_example]
    if changed:
        return f"nothing is known of what {changed[0]} leaves of the zeros that show the masked patches"
    if on_zeros and to_zeros:
        return f"{on_zeros[0]} and {to_zeros[0]} together hide the zeros that show the masked patches"
    if inside and threat.update == "delta":
        return f"how loud the noise of {inside[0]} is in a weight delta is not known, so it hides the masked patches"
    return None


def read_mask(upload: Upload, model: Entrance, threat: ThreatModel) -> Tensor:
    """Read which patches were masked; of several pictures, in all of them.

    ``mask_refusal`` must be None. Without an unknown embedding nothing is masked.

    Args:
        upload: With the gradient of the position embedding.
        model: The model that the server had sent.
        threat: States the defences.

    Returns:
        (patches,) bool on the model's device.

    Raises:
        AttackFailedError: If what was done to this upload leaves in doubt which patches were masked.
    """
    positions = on_device(upload, names.POSITION_EMBEDDING, model)
    rows = positions[0, model.prefix_tokens :]
    if not model.defended:
        return torch.zeros_like(rows[:, 0], dtype=torch.bool)
    if "pruned" in threat.marks:
        return _empty_rows(rows)
    if deviation := threat.noise_on(positions):
        return _silent_rows(rows, deviation)
    return (rows == 0).all(dim=1)


def _empty_rows(rows: Tensor) -> Tensor:
    entries_left = (rows != 0).sum(dim=1)
    empty: Tensor = entries_left == 0
    fewest = int(entries_left[~empty].min()) if not empty.all() else 0
    if fewest < FEWEST:
        raise AttackFailedError(
            f"which patches were masked is in doubt: after pruning, a row of the position embedding's gradient has "
            f"{fewest} entries left, so that others without any may have been emptied by it"
        )
    return empty


def _silent_rows(rows: Tensor, deviation: float) -> Tensor:
    powers = rows.square() / deviation**2
    excess = _excess(powers, NORMAL)
    if bool((excess <= SILENT).any()):
        excess = _excess(powers, max(NORMAL, float(powers[excess <= SILENT].square().mean())))
    silent: Tensor = excess <= SILENT
    count = int(silent.sum())
    if count > MOST * len(rows):
        raise AttackFailedError(
            f"every patch is masked or drowned in noise: {count} of {len(rows)} rows of the position embedding's "
            "gradient are no louder than the noise"
        )
    hidden = count and abs(float(excess[silent].mean())) > SILENT / count**0.5
    if hidden or bool((~silent & (excess < LOUD)).any()):
        raise AttackFailedError(
            "which patches were masked is in doubt: rows of the position embedding's gradient are hardly louder than "
            "the noise"
        )
    return silent


def _excess(powers: Tensor, kurtosis: float) -> Tensor:
    """Compare each row's mean square with that of noise of this kurtosis, in its standard deviations."""
    excess: Tensor = (powers.mean(dim=1) - 1) / ((kurtosis - 1) / powers.shape[1]) ** 0.5
    return excess
