"""What a build will take: rows, FLOP, bytes, hours."""
