"""The app's ClientApp, watched from outside: it gets what it would get, and its reply is passed on as it is."""

import copy
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from . import settings
from .estimators import watch_estimators
from .mods import watch_mods
from .watching import MessageWatch, watch_torch

SETTINGS = settings.read(settings.CLIENT)
FOLDER = Path(SETTINGS["folder"])


class WatchedClientApp(ClientApp):
    """Calls the app's own ClientApp; what hooks saw of a training message goes to the evaluator's folder."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer as the app does."""
        training = message.metadata.message_type.partition(".")[0] == "train"
        context.node_config.update(SETTINGS["node_config"])
        try:
            settings.contain(SETTINGS)
            if SETTINGS["stand_in"]:
                from . import stand_ins  # noqa: PLC0415 (only where asked for)

                stand_ins.install(SETTINGS)
            watch_torch()
            watch_mods(FOLDER)
            app = settings.load(SETTINGS["component"])
            watch_estimators()
            if message.metadata.message_type == settings.WARM:
                return Message(RecordDict(), reply_to=message)
            repeat = _repeat(message)
            with MessageWatch(FOLDER, Path(SETTINGS["model"]), message, repeat) as watch:
                # What an app keeps for its next round is the same in every repeat.
                reply: Message = app(message, context if repeat is None else copy.deepcopy(context))
        except (Exception, SystemExit) as error:
            settings.note_problem(FOLDER, "client", error)
            raise
        if training:
            watch.keep(reply)
        return reply


def _repeat(message: Message) -> int | None:
    """Return which repeat of a message this is; None if it is the app's own. The app does not see the mark."""
    if settings.REPEAT not in message.content:
        return None
    return int(message.content.pop(settings.REPEAT)["number"])  # type: ignore[arg-type]  # a number


app = WatchedClientApp()
