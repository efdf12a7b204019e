"""A Flower app that asks two nodes of `fedmjp deploy check`, and nobody else: what sites have not allowed to run."""
