"""Semantic segmentation of ADE20K by UperNet on a Swin transformer, as MJP's Table 9 has it."""
