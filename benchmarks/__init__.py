"""Side-by-side ratios against peers: both sides in one run, equal outputs checked before timing."""
