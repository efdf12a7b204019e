"""What a client does."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from small_site.task import load_data, make_model, test, train

app = ClientApp()


def prepare(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    node, config = context.node_config, context.run_config
    return model, device, load_data(node["partition-id"], node["num-partitions"], config["batch-size"])


@app.train()
def train_round(message: Message, context: Context):
    model, device, (trainloader, _) = prepare(message, context)
    steps = context.run_config["steps"]
    loss = train(model, trainloader, steps, message.content["config"]["lr"], device)
    metrics = {"train_loss": loss, "num-examples": steps * context.run_config["batch-size"]}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context):
    model, device, (_, testloader) = prepare(message, context)
    loss, accuracy = test(model, testloader, device)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
