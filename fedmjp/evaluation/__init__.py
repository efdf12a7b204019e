"""Evaluation of trained models: accuracy, consistency under jigsaws, robustness, position embeddings."""
