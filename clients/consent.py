"""What a run may do with the files of a node's machine: what the node's own config allows, whatever the server asks."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedmjp.data.datasets import BUNDLED
from fedmjp.errors import ConfigError


class Consent(NamedTuple):
    """Places of a node that a run uses.

    Attributes:
        own: Folder of the node's own pictures; None where those that the run names are taken.
        private: Folder in which private pictures are left for an evaluator; None leaves none.
    """

    own: str | None
    private: Path | None

    @classmethod
    def of(cls, node: Mapping[str, Any], pictures: str, private: str) -> Self:
        """Hold what a run asks for against a node's config.

        Args:
            node: Its config: ``data`` is the folder of its own pictures, ``reads`` one below which runs may name
                pictures, ``leaves`` one below which they may have private ones left. Workers of a simulation are on the
                machine of whoever started it and do what the run says.
            pictures: That the run names.
            private: Folder that the run names; empty asks for nothing.

        Raises:
            ConfigError: If the run asks for what the node did not allow.
        """
        own_folder = str(node["data"]) if "data" in node else None
        if own_folder is None and pictures != BUNDLED and not (is_simulated() or _below(pictures, node.get("reads"))):
            raise ConfigError(
                f"the run names pictures on this machine, {pictures}, and this node did not say that it may: start it "
                "with data=FOLDER (its own pictures) or reads=FOLDER (what runs may name) in --node-config"
            )
        if private and not (is_simulated() or _below(private, node.get("leaves"))):
            raise ConfigError(
                f"the run asks for private pictures to be left in {private}, and this node did not say that it may: "
                "start it with leaves=FOLDER in --node-config, or take evaluator-folder out of the run"
            )
        return cls(own_folder, Path(private) if private else None)


def is_simulated() -> bool:
    """Tell whether this process is a worker of Flower's simulation engine, which is Ray's."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _below(folder: str, allowed: object) -> bool:
    return allowed is not None and Path(folder).resolve().is_relative_to(Path(str(allowed)).resolve())
