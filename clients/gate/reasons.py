"""What a server may be told of a refusal: one of few sentences, none of which holds anything of the data."""

from enum import StrEnum

from flwr.app import Error, Message

from fedmjp.errors import FedmjpError
from fedmjp.wire import REFUSED

SAID = "the site's upload gate: "


class Reason(StrEnum):
    """Why a reply does not leave."""

    PICTURES = "pictures come back"
    FEATURES = "features come back"
    LABELS = "labels come back"
    FEW = "too few pictures behind the upload"
    UNSEEN = "the batches behind the upload were not seen"
    UNJUDGED = "arrays that cannot be compared with anything that came in"
    FORM = "arrays of other names, types or shapes than in the first round of the run"
    DEFENCE = "the defended upload still gives pictures back"
    BOUNDS = "a setting of the server's is out of bounds"
    RATE = "the optimiser's learning rate is out of bounds"
    MODEL = "the model that came in is suspicious"
    UNREADABLE = "an array is not what its bytes say"
    LAYOUT = "an array's record, name, shape or type did not come in; arrays in the policy lists further ones"
    NAMES = "a record, metric, setting or text that is not listed; clear.names in the policy lists them"
    NUMBERS = "more numbers in clear than may leave; clear.values in the policy limits them"
    TEXT = "more text in clear than may leave; clear.bytes in the policy limits it"
    REPLY_BITS = "more bits in clear than a reply may hold; clear.reply_bits in the policy limits them"
    RUN_BITS = "more bits in clear than a run may hold; clear.run_bits in the policy limits them"
    ARRAYS = "arrays in a reply to another message than train"
    JUDGED = "the reply cannot be judged or defended"
    ANSWERED = "the app answered with an error, which the log at the site tells"
    ERROR = "an error"
    LEDGER = "the ledger cannot be written"
    BUNDLE = "the app's bundle is not on the site's list"
    UNGATED = "the reply did not pass the gate beside the app"


class RefusedError(FedmjpError):
    """The policy does not let a reply out."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def refusal(message: Message, reason: Reason) -> Message:
    """Make the error that leaves in place of the reply to a message.

    Args:
        message: From the server.
        reason: What the server is told.
    """
    return Message(Error(code=REFUSED, reason=SAID + reason), reply_to=message)


def read_reason(error: Error) -> Reason | None:
    """Read the reason in an error that ``refusal`` made.

    Args:
        error: Of a reply.

    Returns:
        The reason; None for any other error, whose text may hold anything.
    """
    text = str(error.reason).removeprefix(SAID)
    return Reason(text) if error.code == REFUSED and text in set(Reason) else None
