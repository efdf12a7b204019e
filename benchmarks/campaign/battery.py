"""Batteries: what every model and defence is tried with, by a name and a version that stand in each verdict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedmjp.benchmarks.plan.experiment import AttackConfig, named
from fedmjp.config import Config
from fedmjp.defences.pipeline import DefenceConfig, Defences, pipeline_of
from fedmjp.errors import ConfigError, suggestion
from fedmjp.settings import Setting
from fedmjp.threat import Server, ThreatModel
from fedmjp.yaml_files import read_yaml

FOLDER = Path(__file__).parents[1] / "batteries"
SUM = "secure_sum"
Attacks = tuple[Annotated[AttackConfig, BeforeValidator(named)], ...]


class View(Config):
    """What a server may see or send, and what is tried there."""

    name: str
    threat: Mapping[str, Any] = Field({}, description="values of a scenario")
    server: Server = Field(None, description="how the server changes the weights that it sends; by default not at all")
    sum_of: int = Field(1, ge=1, description="clients whose updates the server sees as one")
    attacks: Attacks = Field(min_length=1)
    searches: Attacks = Field((), description="attacks that take long; not run where they do not know a defence")

    def repeats(self, defences: Defences) -> bool:
        """Tell whether clients would upload the same again and again here.

        Args:
            defences: What clients do, in order.
        """
        threat = ThreatModel.parse(self.threat)
        return threat.uploads_per_picture > 1 and not threat.crop_scale and not pipeline_of(defences).draws

    def pipeline(self, defences: Defences) -> Defences:
        """Add a sum of clients to their defences, where the server sees sums and they ask for none.

        Args:
            defences: What clients do, in order.
        """
        if self.sum_of == 1 or pipeline_of(defences).clients > 1:
            return defences
        return (*defences, DefenceConfig.parse({"name": SUM, "clients": self.sum_of}))

    def grids(self, models: tuple[str, ...], defences: Defences, searched: int) -> list[dict[str, Any]]:
        """List values of grids that try defences: one for all pictures, and one for each slow search.

        Args:
            models: Names of models.
            defences: What clients do, in order.
            searched: Uploads that a search gets.
        """
        pipeline = self.pipeline(defences)
        shared = {
            "models": models,
            "defences": (pipeline,),
            "settings": (Setting.C if pipeline_of(pipeline).shuffles else Setting.A,),
            "threats": (self.threat,),
            "server": self.server,
        }
        pictures = ThreatModel.parse(self.threat).batch_size * pipeline_of(pipeline).clients
        slow = [{**shared, "attacks": (search,), "pictures": searched * pictures} for search in self.searches]
        return [{**shared, "attacks": self.attacks}, *slow]


class Battery(Config):
    """A named set of views; searches have the first ``searched`` uploads."""

    name: str
    version: int = Field(ge=1)
    searched: int = Field(ge=1)
    views: tuple[View, ...] = Field(min_length=1)

    @property
    def label(self) -> str:
        """Return name and version, as verdicts show them: ``standard 1``."""
        return f"{self.name} {self.version}"


def batteries() -> list[str]:
    """List the names of all batteries."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_battery(name: str) -> Battery:
    """Read a battery.

    Args:
        name: Of a file in ``batteries/``.

    Raises:
        ConfigError: If there is none.
    """
    if name not in batteries():
        raise ConfigError(f"there is no battery {name!r}, {suggestion(name, batteries())}")
    return Battery.parse(read_yaml(FOLDER / f"{name}.yaml")[1])
