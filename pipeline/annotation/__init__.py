"""Parts of labelling: what is measured of the real images, and the rules that use it."""
