"""The small convolutional network of pfl-research's CIFAR-10 benchmark, to be measured beside it.

Convolutions of 3x3 to 32 and 64 channels, a 2x2 maximum, dropout ¼, 128 hidden units, dropout ½.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class CnnConfig:
    model_type: ClassVar[str] = "simple_cnn"
    channels: int
    image_size: int
    num_labels: int


class CnnOutput(NamedTuple):
    logits: Tensor


class SimpleCnn(nn.Module):
    """Called like a transformers image classifier."""

    def __init__(self, config: CnnConfig) -> None:
        super().__init__()
        self.config = config
        side = (config.image_size - 4) // 2
        self.conv1 = nn.Conv2d(config.channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.hidden = nn.Linear(64 * side * side, 128)
        self.classifier = nn.Linear(128, config.num_labels)

    def forward(self, pixel_values: Tensor) -> CnnOutput:
        # (batch, channels, s, s) -> (batch, 64, s - 4, s - 4) -> (batch, 16 (s - 4)²) -> (batch, classes)
        seen = self.conv2(self.conv1(pixel_values).relu()).relu()
        seen = functional.dropout(functional.max_pool2d(seen, 2), 0.25, self.training)
        seen = functional.dropout(self.hidden(seen.flatten(1)).relu(), 0.5, self.training)
        return CnnOutput(self.classifier(seen))
