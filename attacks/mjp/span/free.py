"""Zeros of the equations without a model of the attention.

Seen from z2 = z + o, the MLP alone decides: h = norm2(z2) must lie in one known span and GELU(fc1 h) in
another, which singles out the true z2 whatever o is. So o need only be good enough to start from. What is
then left of a true token is the upload's rounding, while a wrong one stays well above it: every token
carries its own proof, before the others are known.
"""

import torch
from torch import Tensor

from fedmjp.attacks.mjp.span.equations import LEVEL_WEIGHT, PatchEquations
from fedmjp.attacks.mjp.span.minimise import Pull, Steps, Zeros, minimise

LEASH = (0.1, 1e-3)  # weight of the distance to where the attention would have it
STEPS = Steps(5, enough=1e-2)


def free(equations: PatchEquations, attended: Tensor) -> Zeros:
    """Release tokens from the attention that was assumed; return the zeros of the freed equations that they lead to.

    A weak leash keeps the part that coefficients cannot reach near where it was.

    Args:
        equations: Of one upload.
        attended: (rows, dim), z + o to start from.
    """
    freed = equations.freed
    reached, _ = torch.linalg.qr(equations.directions)
    beyond = freed.directions - reached @ (reached.T @ freed.directions)
    centre = attended @ freed.directions
    places = torch.zeros(len(attended), dtype=torch.int64, device=attended.device)
    zeros = Zeros.at(centre)
    for weight in LEASH:
        pull = Pull(weight, centre, beyond.T @ beyond)
        zeros = minimise(freed, zeros.coefficients, places, lambda tokens: tokens, STEPS, pull)
    return zeros


def coefficients_of(equations: PatchEquations, places: Tensor, freed: Tensor, attention: Tensor) -> Tensor:
    """Solve z + o = scale * freed + shift for coefficients (rows, unknowns).

    Of masked patches, the level's equation is solved, too.

    Args:
        equations: Of one upload.
        places: (rows,).
        freed: (rows, dim), z + o up to scale and shift, which norm2 hides.
        attention: (rows, dim), o.
    """
    coefficients = torch.empty(len(freed), equations.unknowns, dtype=freed.dtype, device=freed.device)
    level = torch.cat([equations.level, torch.zeros_like(equations.level[:2])]) * LEVEL_WEIGHT
    constant = torch.ones_like(equations.start[0])
    for row, (place, released, output) in enumerate(zip(places.tolist(), freed, attention, strict=True)):
        start, masked = equations.start[place], equations.mask[place].to(level)
        columns = torch.cat([equations.directions, torch.stack([-released, -constant], dim=1)], dim=1)
        system = torch.cat([columns, masked * level[None]])
        right = torch.cat([-start - output, masked * torch.full_like(start[:1], LEVEL_WEIGHT)])
        coefficients[row] = torch.linalg.lstsq(system, right[:, None]).solution[: equations.unknowns, 0]
    return coefficients
