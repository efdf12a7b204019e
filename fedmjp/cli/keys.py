"""The keys that KEY=VALUE knows, for --help: written down, because to ask for them takes seconds of imports."""

_MODEL = (
    "name, image_size, patch_size, classes, seed, weights, localisation, localisation_layers, index_embedding, "
    "unknown_embedding"
)
_RECIPE = (
    "batch_size, at_once, learning_rate, warmup_learning_rate, final_learning_rate, warmup_epochs, weight_decay, "
    "label_smoothing, drop_path, clip_gradient, repeats, crop_scale, flip, color_jitter, rand_augment, random_erasing, "
    "mixup, cutmix, crop_share, precision, compile, workers"
)
_PUZZLE = "probability, warmup_epochs, masks, localisation_weight, localisation_schedule"
_GROUPS = {"model": _MODEL, "recipe": _RECIPE, "puzzle": _PUZZLE}
_ALONE = "data, seed, device, defences, checkpoint_every"

TRAINED = {"": _ALONE, **_GROUPS, "recipe": f"epochs, {_RECIPE}"}
SIMULATED = {
    "": f"{_ALONE}, clients, strategy, rounds, local_epochs, participation, records, server_learning_rate, "
    "server_momentum, proximal_mu, hostile, max_norm, quorum, round_seconds, labels_known, server",
    **_GROUPS,
    "partition": "scheme, alpha, classes_per_client",
}
DEPLOYED = {
    "": f"{_ALONE}, strategy, rounds, local_epochs, participation, server_learning_rate, server_momentum, proximal_mu, "
    "hostile, max_norm, quorum, round_seconds, labels_known",
    **_GROUPS,
}
