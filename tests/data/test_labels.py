import torch

from data.labels import sharpen, soft_labels


def test_sharpening_by_hand():
    torch.testing.assert_close(
        sharpen(torch.tensor([0.5, 1.0, 0.0]), 4.0), torch.tensor([0.5, 0.880797, 0.119203])
    )


def test_labels_have_two_entries_that_sum_to_one():
    labels = soft_labels(torch.tensor([0.25, 1.0]), torch.tensor([2, 0]), torch.tensor([0, 1]), 4)
    torch.testing.assert_close(labels, torch.tensor([[0.75, 0.0, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]))
