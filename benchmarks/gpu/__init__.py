"""Benchmarks of one GPU on the true architectures with random weights."""
