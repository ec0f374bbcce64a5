"""Example data of the trial: scikit-learn's handwritten digits as pictures, in folders by class."""

from pathlib import Path

from PIL import Image

from fedfrozen_app.data.sources.digits import read_digits
from fedfrozen_app.data.sources.raw_rows import DatasetSpec

ROWS_OF_A_SITE, TEST_ROWS = 300, 200
CLASSES = [str(digit) for digit in range(10)]


def write_examples(folder: Path, sites: tuple[str, ...]) -> None:
    """FOLDER/SITE/CLASS/*.png for each site, and FOLDER/test for the server.

    The sites differ: most images of each are from its half of the classes.
    """
    rows = read_digits(DatasetSpec(kind="digits")).train
    room = dict.fromkeys((*sites, "test"), ROWS_OF_A_SITE) | {"test": TEST_ROWS}
    for number, (pixels, label) in enumerate(zip(rows.content, rows.labels, strict=True)):
        home = sites[int(str(label)) * len(sites) // len(CLASSES)]
        owner = "test" if number % 4 == 0 else home if number % 4 < 3 else sites[number // 4 % len(sites)]
        if room[owner]:
            room[owner] -= 1
            target = folder / owner / str(label)
            target.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(target / f"{number}.png")
