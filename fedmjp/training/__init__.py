"""The recipe of MJP's paper and one training loop, for central runs and for Flower's clients."""
