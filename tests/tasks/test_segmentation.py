"""Masks: metrics by hand, the loss by hand, and what rows are dealt by."""

import math

import numpy as np
import pytest
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.tasks.mask_scores import border, dice, hd95, iou, mean_scores
from fedfrozen_app.tasks.segmentation import mask_of
from fedfrozen_app.tasks.target import target_of

TARGET = target_of("segmentation")


def square(side, top, left, size):
    mask = np.zeros((side, side), dtype=bool)
    mask[top : top + size, left : left + size] = True
    return mask


def test_overlap_of_two_squares_by_hand():
    """4x4 and 4x4, shifted by one each way: 9 pixels are in both, 23 in either."""
    one, other = square(10, 2, 2, 4), square(10, 3, 3, 4)
    assert dice(one, other) == 2 * 9 / 32
    assert iou(one, other) == 9 / 23
    assert dice(one, one) == iou(one, one) == 1.0


def test_the_border_is_what_has_a_neighbour_outside():
    mask = square(6, 1, 1, 4)
    assert border(mask).sum() == 12 and not border(mask)[2:4, 2:4].any()
    assert border(np.ones((3, 3), dtype=bool)).sum() == 8  # beyond the picture is outside


def test_distance_of_two_squares_by_hand():
    """Shifted by 3 to the right: of each 12 border pixels the farther column's are 3 away, and 4 of them are
    more than 5 %."""
    one, other = square(12, 2, 2, 4), square(12, 2, 5, 4)
    distances = sorted([3, 3, 3, 3, 2, 2, 1, 1, 0, 0, 0, 0])  # of the first square's border pixels
    assert hd95(one, other) == pytest.approx(np.percentile(distances, 95)) == 3.0
    assert hd95(one, one) == 0.0
    far = square(12, 2, 2, 1), square(12, 5, 6, 1)
    assert hd95(*far) == 5.0  # 3 down and 4 to the right


def test_the_larger_direction_counts():
    """One pixel is part of the other mask: from it the way is 0, and from the far pixel 6."""
    one, other = square(12, 2, 2, 1), square(12, 2, 2, 1) | square(12, 2, 8, 1)
    assert hd95(one, other) == hd95(other, one) == pytest.approx(np.percentile([0, 6], 95))


def test_empty_masks_by_rule():
    empty, full = np.zeros((3, 4), dtype=bool), np.ones((3, 4), dtype=bool)
    assert all(math.isnan(measure(empty, empty)) for measure in (dice, iou, hd95))
    assert dice(empty, full) == dice(full, empty) == iou(full, empty) == 0.0
    assert hd95(empty, full) == hd95(full, empty) == 5.0  # the diagonal of 3x4


def test_pictures_without_a_class_are_left_out_and_classes_count_alike():
    truth, guess = np.zeros((3, 4, 4), dtype=np.uint8), np.zeros((3, 4, 4), dtype=np.uint8)
    truth[0, 0, :2], guess[0, 0, 1:3] = 1, 1  # Dice 1/2, IoU 1/3
    truth[1, 0, 0], guess[1, 0, 0] = 2, 2  # the only picture of class 2
    found = mean_scores(truth, guess, (1, 2, 3))
    assert found == {"dice": 0.75, "iou": pytest.approx(2 / 3), "hd95": 0.5 * np.percentile([0, 1], 95)}
    assert mean_scores(truth[2:], guess[2:], (1, 2)) == {}


def test_loss_by_hand():
    """Two pixels, two classes with equal logits: cross-entropy log 2; soft Dice (2·½ + 1)/(1 + 1 + 1)."""
    logits = torch.zeros(1, 2, 1, 2, dtype=torch.float64)
    labels = torch.tensor([[[0, 1]]], dtype=torch.uint8)
    assert TARGET.losses(logits, labels).item() == pytest.approx(math.log(2) + 1 - 2 / 3)


def test_each_example_has_a_loss_of_its_own_and_padding_has_none():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3, 4, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (3, 4, 4), generator=generator, dtype=torch.uint8)
    each = TARGET.losses(logits, labels)
    alone = torch.cat([TARGET.losses(logits[row, None], labels[row, None]) for row in range(3)])
    torch.testing.assert_close(each, alone, rtol=0, atol=1e-15)
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    assert TARGET.batch_loss(logits, labels, None, mask).item() == pytest.approx(each[:2].mean().item())
    assert TARGET.batch_loss(logits, labels, None, 0 * mask).item() == 0.0


def test_predictions_are_class_numbers_and_perfect_ones_score_one():
    labels = torch.tensor([[[0, 1], [2, 2]]], dtype=torch.uint8)
    logits = torch.nn.functional.one_hot(labels.long(), 3).permute(0, 3, 1, 2).float()
    predicted = TARGET.predictions(logits)
    assert predicted.dtype is torch.uint8 and torch.equal(predicted, labels)
    assert TARGET.measure(predicted, labels, ("0", "1", "2")) == {"dice": 1.0, "iou": 1.0, "hd95": 0.0}


def test_rows_are_dealt_by_their_largest_class():
    masks = [mask_of(np.array(rows, dtype=np.uint8)) for rows in ([[0, 7, 7, 9]], [[0, 0, 0, 9]], [[0, 0]])]
    assert TARGET.strata(masks) == ["7", "9", "0"]
    assert TARGET.mixes(masks)[0] == {"7": 2, "9": 1}
    assert TARGET.class_names({"0", "9", "10"}, in_order=False) == ("0", "9", "10")


def test_masks_become_class_numbers():
    masks = [mask_of(np.array([[0, 255]], dtype=np.uint8)), mask_of(np.array([[255, 255]], dtype=np.uint8))]
    assert TARGET.numbered(masks, {"0": 0, "255": 1}).tolist() == [[[0, 1]], [[1, 1]]]
    with pytest.raises(UserError, match=r"set dataset\.image_size"):
        TARGET.numbered([*masks, mask_of(np.zeros((2, 2), dtype=np.uint8))], {"0": 0, "255": 1})


def test_what_a_constant_mask_scores():
    labels = torch.tensor([[[0, 1], [1, 1]]], dtype=torch.uint8)
    assert TARGET.trivial(labels) == {"majority_dice": pytest.approx(2 * 0.75 / 1.75)}
