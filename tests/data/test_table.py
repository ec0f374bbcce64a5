import numpy as np
import torch

from fedfrozen_app.data.table import Table


def test_take_and_to_keep_rows_together():
    table = Table(
        {"input_ids": torch.arange(8).reshape(4, 2), "attention_mask": torch.ones(4, 2)},
        torch.tensor([10, 11, 12, 13]),
    )
    part = table.take(np.array([3, 1])).to("cpu")
    assert len(table) == 4 and len(part) == 2
    assert part.labels.tolist() == [13, 11]
    assert part.inputs["input_ids"].tolist() == [[6, 7], [2, 3]]
    assert part.take(torch.tensor([1])).labels.tolist() == [11]


def test_taking_nothing_gives_an_empty_table():
    table = Table({"pixel_values": torch.zeros(2, 1, 4, 4, dtype=torch.uint8)}, torch.zeros(2))
    empty = table.take(np.array([]))
    assert len(empty) == 0 and empty.inputs["pixel_values"].shape == (0, 1, 4, 4)
