"""Where slots run: threads here, or tasks of a Dask or Ray cluster."""
