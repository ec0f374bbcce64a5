"""Random pictures and texts: where only speed is measured, they take as long as real ones."""

import numpy as np
import torch

from fedfrozen_app.data.table import Corpus, Table

CLASSES = tuple("abcdefghij")
VOCABULARY = 30_522  # of BERT


def random_corpus(task: str, size: int, train_rows: int, test_rows: int = 1000) -> Corpus:
    """Of "image" rows of `size` x `size` pixels, or of "text" rows of `size` tokens at the most."""
    random = np.random.default_rng(0)

    def table(count: int) -> Table:
        labels = torch.from_numpy(random.permutation(np.arange(count) % len(CLASSES)))
        if task == "image":
            pixels = random.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
            return Table({"pixel_values": torch.from_numpy(pixels)}, labels)
        lengths = torch.from_numpy(random.integers(size // 4, size + 1, count))
        mask = (torch.arange(size) < lengths[:, None]).long()
        tokens = torch.from_numpy(random.integers(5, 30_000, (count, size))) * mask
        return Table({"input_ids": tokens, "attention_mask": mask}, labels)

    train, test = table(train_rows), table(test_rows)
    channels = 3 if task == "image" else 0
    return Corpus(
        name="random",
        task=task,
        classes=CLASSES,
        train=train,
        test=test,
        columns={},
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        vocab_size=VOCABULARY if task == "text" else 0,
        pad_token_id=0,
        strata=train.labels.numpy(),
        stratum_names=CLASSES,
        units=np.arange(len(train)),
        test_strata=test.labels.numpy(),
        test_units=np.arange(len(test)),
    )
