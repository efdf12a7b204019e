"""Records of any network: the inputs of its first linear layer from that layer's gradient, and pictures from these."""
