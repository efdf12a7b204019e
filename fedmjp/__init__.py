"""What the client, the attacker and the evaluator of a federated-learning privacy benchmark share."""

__version__ = "0.1.0"
