"""The probe's client, which no site may run."""

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, _context: Context) -> Message:
    """Answer with nothing.

    Args:
        message: From the probe's server.
    """
    return Message(RecordDict(), reply_to=message)
