"""All that the gate uses of Flower without a public name, as of 1.41.

``tests/test_gate_node.py`` has a canary for each:

- ``start_client_internal._pull_and_store_message`` and ``_push_messages``, by these names, called by keyword in the
  SuperNode's loop; ``_insert_message``, which stores a reply that the SuperNode makes itself;
- ``run_clientapp.get_load_client_app_fn``, by this name, in the process that runs a bundle's ClientApp;
- what a message is made of on its way: objects by the hash of their content.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp

POLL_SECONDS = 0.2
WAIT_SECONDS = 600  # for the content of a reply that was announced
PushAnswer = tuple[set[str], str]


class LostReplyError(Exception):
    """A reply's content did not come."""


def replace_supernode_functions(pull: Callable[..., Any], push: Callable[..., Any]) -> None:
    """Have the SuperNode's loop call other functions in place of Flower's.

    Args:
        pull: Pulls a message; its first argument is Flower's function.
        push: Pushes replies; its first argument is Flower's function.
    """
    original_pull, original_push = start_client_internal._pull_and_store_message, start_client_internal._push_messages
    changed: Any = start_client_internal
    changed._pull_and_store_message = lambda *values, **named: pull(original_pull, *values, **named)
    changed._push_messages = lambda *values, **named: push(original_push, *values, **named)


def store_reply(reply: Message, *, state: Any, object_store: Any) -> None:
    """Store a reply that the SuperNode makes itself, as if an app had made it.

    Args:
        reply: The reply.
        state: Of the SuperNode.
        object_store: Of the SuperNode.
    """
    start_client_internal._insert_message(reply, state, object_store)


def wrap_loaded_app(wrap: Callable[[Callable[[], Any]], Any]) -> None:
    """Wrap the ClientApp of whatever bundle the process runs.

    Args:
        wrap: Called with what loads the app; returns the app that runs.
    """
    changed: Any = run_clientapp
    original = changed.get_load_client_app_fn

    def get_load_client_app_fn(**named: Any) -> Callable[..., Any]:
        load = original(**named)
        return lambda *values: wrap(lambda: load(*values))

    changed.get_load_client_app_fn = get_load_client_app_fn


def inflate(message_id: str, tree: Any, contents: Mapping[str, bytes], object_store: Any) -> Message:
    """Build a message from the contents of its objects, some of which the store had already.

    Args:
        message_id: Name of the message.
        tree: Of its objects.
        contents: Objects by name.
        object_store: Where the other objects are.

    Raises:
        LostReplyError: If an object is missing.
    """
    names = [part.object_id for part in iterate_object_tree(tree)]
    whole = {name: contents[name] if name in contents else object_store.get(name) for name in names}
    if any(not content for content in whole.values()):
        raise LostReplyError
    message = inflate_object_from_contents(message_id, whole)
    if not isinstance(message, Message):
        raise TypeError("no message")
    message.metadata.__dict__["_message_id"] = message_id
    return message


def await_reply(message_id: str, tree: Any, object_store: Any) -> Message:
    """Wait for a reply whose content a process is still sending.

    Args:
        message_id: Name of the reply.
        tree: Of its objects.
        object_store: Where they arrive.

    Raises:
        LostReplyError: If the content does not come.
    """
    contents: dict[str, bytes] = {}
    end = time.monotonic() + WAIT_SECONDS
    for part in iterate_object_tree(tree):
        while not (content := object_store.get(part.object_id)):
            if content is None or time.monotonic() > end:
                raise LostReplyError
            time.sleep(POLL_SECONDS)
        contents[part.object_id] = content
    return inflate(message_id, tree, contents, object_store)


def send_whole(
    message: Message, send: Callable[..., PushAnswer], push_object: Callable[..., None], runtime: float
) -> PushAnswer:
    """Send a message and its content as it is in memory.

    Args:
        message: What to send.
        send: Announces the message without its content.
        push_object: Sends an object.
        runtime: Seconds that the app took.

    Returns:
        The empty set, which says that nothing remains to be sent, and the session.
    """
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        objects = get_all_nested_objects(message)
        bare = remove_content_from_message(message) if message.has_content() else message
        missing_objects, session = send(bare, get_object_tree(message), runtime)
        for object_id in missing_objects:
            push_object(message.metadata.run_id, session, object_id, objects[object_id].deflate())
    return set(), session


def hash_content(content: RecordDict) -> str:
    """Return the SHA-256 of a message's content, as Flower names it.

    Args:
        content: Of the message.
    """
    return str(content.object_id)
