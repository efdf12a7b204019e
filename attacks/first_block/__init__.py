"""The first block of a vision transformer: tokens and patches that its gradients single out; ``first_mlp``."""
