"""The probe's server: sends each node known numbers, and writes down what came back."""

import json
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Ask the nodes that the run-config names, and write an answer for each to its file.

    Args:
        grid: Reaches the nodes.
        context: With ``nodes``, ``seconds`` and ``output`` in its run-config.
    """
    nodes = [int(node) for node in str(context.run_config["nodes"]).split(",")]
    messages = []
    for node in nodes:
        arrays = ArrayRecord([np.full(16, float(place)) for place in range(2)])
        messages.append(Message(RecordDict({"arrays": arrays}), dst_node_id=node, message_type="train"))
    replies = grid.send_and_receive(messages, timeout=cast(float, context.run_config["seconds"]))
    answers = {str(r.metadata.src_node_id): r.error.reason if r.has_error() else sorted(r.content) for r in replies}
    Path(str(context.run_config["output"])).write_text(json.dumps(answers), encoding="utf-8")
