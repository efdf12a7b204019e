"""Federated runs on this machine, through a Flower SuperLink of their own."""
