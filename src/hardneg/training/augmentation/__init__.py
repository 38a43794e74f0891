"""Views for contrastive training: two random augmentations of each image or graph.

augment.py is SimCLR's augmentation on the device, with its image operations in pixels.py; views.py resolves
``--augment`` and wraps any callable; transforms.py seeds transforms of single images, such as torchvision's; graphs.py
has GraphCL's augmentations.
"""

from hardneg.training.augmentation.transforms import from_transform

__all__ = ["from_transform"]
