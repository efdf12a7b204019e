"""``first_mlp``: uploads without embeddings. The gradients of the first block alone state every token that enters it."""
