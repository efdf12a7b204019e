"""Show the server several clients' updates as one."""

from typing import ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import Defence


class SecureSumOptions(Config):
    """Options of the sum."""

    clients: int = Field(10, ge=2, description="whose updates the server sees only the sum of")


class SecureSum(Defence):
    """Ideal secure aggregation: the server learns the sum of several clients' updates and nothing else.

    This is the ideal that a protocol of secure aggregation aims at: no client drops out, none works with the
    server, and the sum is exact. A malicious server that sends other weights to one client is outside of it.

    Example:
        >>> SecureSum({"clients": 4}).clients
        4
    """

    name = "secure_sum"
    paper = "Bonawitz et al., Practical secure aggregation, CCS 2017, its ideal functionality"
    summary = "ideal secure aggregation: the server sees the sum over several clients only"
    told = "the sum of the clients' updates, ideally computed, and how many clients there are"
    stages = ("aggregate",)
    marks: ClassVar = frozenset({"summed"})
    draws = False
    options_type = SecureSumOptions

    @property
    @override
    def clients(self) -> int:
        return int(self.options.clients)
