"""What our HTML pages share: one file each, which loads nothing and runs no script."""
