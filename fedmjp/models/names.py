"""Parameter names that attacks and defences refer to; positions in a list are never used."""

POSITION_EMBEDDING = "backbone.pos_embed"
UNKNOWN_EMBEDDING = "unknown_embedding"
PATCH_WEIGHT = "backbone.patch_embed.proj.weight"
PATCH_BIAS = "backbone.patch_embed.proj.bias"
CLASS_TOKEN = "backbone.cls_token"  # noqa: S105 (no password)
FIRST_QKV_WEIGHT = "backbone.blocks.0.attn.qkv.weight"
NORM_WEIGHT = "backbone.norm.weight"  # of the last LayerNorm
NORM_BIAS = "backbone.norm.bias"
HEAD_WEIGHT = "backbone.head.weight"
HEAD_BIAS = "backbone.head.bias"

# Not a parameter and in no real upload: gradients of all tokens, masked ones too. Direct mode adds it
# for attacks that are bounds.
ORACLE_TOKEN_GRADIENTS = "oracle.token_gradients"  # noqa: S105 (no password)
