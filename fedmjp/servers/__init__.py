"""Servers that change weights: what all parties know of them; the servers themselves are in ``server.modifications``.

They are for measuring one's own deployment. Other packages add theirs through the entry-point group
``fedmjp.servers``: the name, and ``module:class``.
"""

from typing import TYPE_CHECKING

from fedmjp.registry import Registry

if TYPE_CHECKING:
    from fedmjp.servers.base import Modification

SERVERS: "Registry[type[Modification]]" = Registry(
    "server",
    {
        "class_fishing": "server.modifications.class_fishing:ClassFishing",
        "feature_fishing": "server.modifications.feature_fishing:FeatureFishing",
        "suppression": "server.modifications.suppression:Suppression",
        "token_imprint": "server.modifications.token_imprint:TokenImprint",
    },
    entry_points="fedmjp.servers",
)
HONEST = "honest"  # how a server that changes nothing is called
SCOPE = "Servers that change weights are for measuring your own deployment, in federations started here alone."
