"""What is measured of a trained run: test images, shifted ones, foreign ones."""
