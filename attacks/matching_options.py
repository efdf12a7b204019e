"""Options of gradient matching."""

from typing import Literal

from pydantic import Field

from fedmjp.config import Config, Names
from fedmjp.models import names

NOISE = "noise"
ALL = "all"


class GradientMatchingOptions(Config):
    """Objective, priors, start and budget."""

    objective: Literal["cosine", "l2"] = Field(
        "cosine", description="distance of gradients: one minus the cosine, or the squared distance over the target's"
    )
    tensors: Names = Field(
        (names.PATCH_WEIGHT,), min_length=1, description="whose gradients are matched: names, comma-separated, or 'all'"
    )
    position_weight: float = Field(
        2.0, ge=0, allow_inf_nan=False, description="of a distance of its own between position-embedding gradients"
    )
    position_centred: bool = Field(
        True, description="take their mean over the patches away first; without it, APRIL's variant"
    )
    total_variation: float = Field(0.2, ge=0, allow_inf_nan=False, description="weight of total variation")
    seams: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of jumps where patches meet")
    patch_prior: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of unlikeness to natural patches")
    start: str = Field("grey", description="'noise', or the attack whose reconstruction is the start")
    mask: Literal["read", "ignore"] = Field(
        "read", description="of a defended model, one picture per update: read it from the upload, or do without"
    )
    iterations: int = Field(1000, ge=1, description="evaluations of the gradient per restart")
    seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="per upload, all restarts together; one iteration is made at least"
    )
    restarts: int = Field(1, ge=1, description="searches per upload, of which the best by its own loss is kept")
    step_size: float = Field(0.02, gt=0, le=1, description="first step of a pixel, in units of its range")
    parallel: int = Field(
        4, ge=1, description="pictures at a time; bounds the memory. With 1, neighbours do not even change rounding"
    )
