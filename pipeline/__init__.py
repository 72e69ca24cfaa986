"""Make mixed shards: plan, condition, generate, annotate, write. Knows no orchestrator."""
