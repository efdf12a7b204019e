"""Parameter names that attacks and defences refer to; positions in a list are never used."""

POSITION_EMBEDDING = "backbone.pos_embed"
UNKNOWN_EMBEDDING = "unknown_embedding"
PATCH_WEIGHT = "backbone.patch_embed.proj.weight"
PATCH_BIAS = "backbone.patch_embed.proj.bias"
FIRST_QKV_WEIGHT = "backbone.blocks.0.attn.qkv.weight"
