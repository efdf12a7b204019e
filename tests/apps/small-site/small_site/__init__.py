"""A small Flower app, as the documentation of Flower and torchvision teaches it."""
