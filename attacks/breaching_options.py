"""Options of the attacks that breaching runs: a few names of our own, and every key of its configuration."""

from typing import Any

from pydantic import ConfigDict, Field

from fedmjp.config import Config
from fedmjp.errors import ConfigError


class BreachingOptions(Config):
    """Keys of breaching's own configuration, dotted, with values in Hydra's grammar."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def own(self) -> dict[str, tuple[str, Any]]:
        """Options with a name of their own, to the key that they stand for and their value."""
        return {}

    def overrides(self) -> dict[str, Any]:
        """All of them as keys of breaching's configuration.

        Raises:
            ConfigError: If a key is given under both of its names.
        """
        found = dict(self.model_extra or {})
        for name, (key, value) in self.own().items():
            if value is not None:
                if key in found:
                    raise ConfigError(f"{name} and {key} are the same option, give one of them")
                found[key] = value
        return found


class OptimisationOptions(BreachingOptions):
    """How long to optimise, and keys of breaching's own configuration."""

    iterations: int | None = Field(None, ge=1, description="of a trial; breaching's own number without it")
    restarts: int | None = Field(None, ge=1, description="trials from new noise, of which the best is kept")
    seconds: float | None = Field(
        None, gt=0, description="per upload; after that, and one iteration at least, the best so far is the result"
    )

    def own(self) -> dict[str, tuple[str, Any]]:
        """Iterations and restarts; the seconds are not breaching's."""
        return {
            "iterations": ("optim.max_iterations", self.iterations),
            "restarts": ("restarts.num_trials", self.restarts),
        }
