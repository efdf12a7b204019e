"""Servers that change weights: the contract and the names; the servers are in ``fedmjp.server.modifications``.

They are for measuring one's own deployment. Other packages add theirs through the entry-point group
``fedmjp.servers``: the name, and ``module:class``.
"""

from typing import TYPE_CHECKING

from fedmjp.registry import Registry

if TYPE_CHECKING:
    from fedmjp.modifications.base import Modification

SERVERS: "Registry[type[Modification]]" = Registry(
    "server",
    {
        "class_fishing": "fedmjp.server.modifications.class_fishing:ClassFishing",
        "feature_fishing": "fedmjp.server.modifications.feature_fishing:FeatureFishing",
        "suppression": "fedmjp.server.modifications.suppression:Suppression",
        "token_imprint": "fedmjp.server.modifications.token_imprint:TokenImprint",
    },
    entry_points="fedmjp.servers",
)
HONEST = "honest"  # how a server that changes nothing is called
SCOPE = "Servers that change weights are for measuring your own deployment, in federations started here alone."
