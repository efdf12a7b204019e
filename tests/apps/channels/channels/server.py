"""The server: asks for one way after another, and writes down what came."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from .model import net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    got = []
    for words in context.run_config["ways"].split(","):
        kind, way, forged = words.split(":")
        config = ConfigRecord({"way": way, "forged": forged == "forged"})
        content = RecordDict({"arrays": ArrayRecord(net().state_dict()), "config": config})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=nodes[0], message_type=kind, group_id=way)])
        metadata = reply.metadata
        got.append({
            "error": reply.error.reason if reply.has_error() else "",
            "content": "" if reply.has_error() else reply.content.object_id,
            "plain": {} if reply.has_error() else {name: dict(record) for name, record in reply.content.items()
                                                   if name != "arrays"},
            "metadata": [metadata.group_id, metadata.message_type, metadata.dst_task_id],
        })  # fmt: skip
    Path(context.run_config["output"]).write_text(json.dumps(got))
