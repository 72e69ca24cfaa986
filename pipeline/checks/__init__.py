"""What is refused before anything heavy is imported or loaded."""

from pipeline.checks.clip import check_clip
from pipeline.checks.models import check_generator, check_models, notes

__all__ = ["check_clip", "check_generator", "check_models", "notes"]
