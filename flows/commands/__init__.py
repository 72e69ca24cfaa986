"""The commands of `semix`; each imports what it needs when it runs."""
