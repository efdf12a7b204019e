"""Attacks that know MJP (Ren et al., CVPR 2023): they use what its masks leave in an upload."""
