"""Ready settings for each model family and study, installed with semix."""

from pathlib import Path

FOLDER = Path(__file__).parent
