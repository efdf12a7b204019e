"""Servers that change weights, one file each; the contract is ``fedmjp.threat``."""
