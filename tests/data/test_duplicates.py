import numpy as np

from data.splits import shared_images


def images(*values: int) -> np.ndarray:
    """One even image for each value."""
    return np.array(values, dtype=np.uint8)[:, None, None, None] + np.zeros((2, 2, 3), np.uint8)


def test_shared_images_are_found_wherever_they_are():
    found = shared_images(
        {
            "train": [images(1, 2, 2), images(3)],
            "validation": iter([images(4), images(2, 5)]),
            "test": [images(6, 4, 7, 3, 6)],
        }
    )
    assert found == [
        (("validation", 1), ("train", 1)),
        (("test", 1), ("validation", 0)),
        (("test", 3), ("train", 3)),
    ]


def test_one_value_makes_a_difference():
    other = images(1)
    other[0, 1, 1, 2] += 1
    assert shared_images({"train": [images(1)], "test": [other]}) == []
    assert shared_images({"train": [], "test": [images(1)]}) == []
