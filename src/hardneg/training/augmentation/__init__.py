"""Views of images."""

from hardneg.training.augmentation.transforms import from_transform

__all__ = ["from_transform"]
