"""Ways to the images that are faster and not exact."""
