"""What is right and wrong with a mixed dataset: figures, flags, a page; read in one pass."""
