"""The training loop, its run directory, options, data, augmentation, encoders, evaluation and recipes."""
