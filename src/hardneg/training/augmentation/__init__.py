"""Views of images."""
