"""Scripts of Flower's first API as a ClientApp and a ServerApp.

A script is run up to the call that would connect, ``start_client``, ``start_numpy_client``, ``start_server`` or
``start_simulation``, whose arguments are what such an app consists of. What a script wants to be told on its command
line is the number of a client, of all clients, or what its own defaults are.
"""

import argparse
import inspect
import re
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

import flwr.client
import flwr.server
import flwr.simulation
from flwr.app import Context
from flwr.client import Client, ClientApp
from flwr.server import ServerApp, ServerAppComponents, ServerConfig

from . import settings

SETTINGS = settings.read(settings.SERVER)
ORDER = {
    "start_client": ("server_address", "client"),
    "start_numpy_client": ("server_address", "client"),
    "start_server": ("server_address", "server", "config", "strategy"),
    "start_simulation": (),
}
NUMBER = re.compile(r"(^|_)(cid|id|partition|rank|idx|index|client|node)$")
COUNT = re.compile(r"(^|_)(num|n|nb|total|number)_(of_)?(clients|partitions|nodes)$")

_clients: dict[int, dict[str, Any]] = {}  # arguments of the call, by the number of the client


class _Reached(BaseException):
    """The call that would connect; no script catches it as an error of its own."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


def _run(side: str, number: int) -> dict[str, Any]:
    """Run a side's script as the client of this number would, and return the arguments of the call that connects."""
    for name, order in ORDER.items():
        for module in (flwr.client, flwr.server, flwr.simulation):
            if hasattr(module, name):
                setattr(module, name, _reach(order))
    parser: Any = argparse.ArgumentParser
    parse = parser.parse_known_args

    def parse_with_numbers(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for action in self._actions:
            if NUMBER.search(action.dest):
                action.default, action.required = str(number), False
            elif COUNT.search(action.dest):
                action.default, action.required = str(SETTINGS["clients"]), False
            elif action.required and action.option_strings:
                action.default, action.required = next(iter(action.choices or ("",))), False
        return parse(self, *arguments, **keywords)

    path = Path(SETTINGS["code"], SETTINGS["scripts"][side])
    words, sys.argv, parser.parse_known_args = sys.argv, [str(path)], parse_with_numbers
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except _Reached as reached:
        return reached.arguments
    finally:
        sys.argv, parser.parse_known_args = words, parse
    raise RuntimeError(f"{path.name} ended before it connected to a server")


def _reach(order: tuple[str, ...]) -> Any:
    def connect(*arguments: Any, **keywords: Any) -> NoReturn:
        raise _Reached({**dict(zip(order, arguments, strict=False)), **keywords})

    return connect


def _make_client(context: Context) -> Client:
    """Make the client that the script would have connected, or that its function makes of a number."""
    number = int(context.node_config["partition-id"])
    if number not in _clients:
        _clients[number] = _run("client", number)
    call = _clients[number]
    client = call.get("client")
    if client is None:
        make = call["client_fn"]
        parameter = next(iter(inspect.signature(make).parameters.values()))
        client = make(context if "context" in parameter.name or parameter.annotation is Context else str(number))
    return client if isinstance(client, Client) else client.to_client()


def _make_server(_: Context) -> ServerAppComponents:
    """Make the server of the script; where there is none, Flower's average of all clients."""
    call = _run("server", 0) if "server" in SETTINGS["scripts"] else {}
    config = call.get("config")
    if not isinstance(config, ServerConfig):
        config = ServerConfig(**(config or {"num_rounds": SETTINGS["rounds"]}))
    parts = {name: call.get(name) for name in ("server", "strategy", "client_manager")}
    return ServerAppComponents(config=config, **parts)


client, server = ClientApp(client_fn=_make_client), ServerApp(server_fn=_make_server)
