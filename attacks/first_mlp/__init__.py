"""``first_mlp``: uploads without embeddings. The first block alone states every token that enters it."""
