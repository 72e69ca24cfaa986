"""Common corruptions of images (Hendrycks and Dietterich 2019), made on the fly."""

from data.corruptions.kinds import EXTRA, STANDARD, corrupt

__all__ = ["EXTRA", "STANDARD", "corrupt"]
