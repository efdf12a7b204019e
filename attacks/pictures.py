"""From recovered patches to a picture."""

from torch import Tensor

from fedmjp.models.entrance import Entrance
from fedmjp.patches import from_patches


def picture(patches: Tensor, model: Entrance) -> Tensor:
    """Assemble patches of the network's input space.

    Args:
        patches: (patches, 3 * patch_size ** 2), normalised, any float type.
        model: Gives patch size, image size, mean and standard deviation.

    Returns:
        (1, 3, size, size) float32 in [0, 1].
    """
    return model.denormalise(from_patches(patches[None], model.image_size, model.patch_size)).float().cpu()
