"""What is written for `AutoTokenizer` and `AutoImageProcessor` reads as the run did, or is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, BertConfig, ByT5Tokenizer

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.byte_tokenizer import byte_tokenizer
from fedfrozen_app.data.sources.synthetic import word_tokenizer
from fedfrozen_app.models.reading import (
    Pictures,
    Texts,
    check_pictures,
    check_tokenizer,
    write_pictures,
    write_tokenizer,
)
from fedfrozen_app.models.task import Normalisation

COLOURS = Pictures(3, 6, (0.2, 0.4, 0.6), (0.1, 0.2, 0.3))
GREY = Pictures(1, 6, (0.3,), (0.2,))


@pytest.mark.parametrize("pictures", [COLOURS, GREY], ids=["colours", "grey"])
def test_pictures_are_resized_and_normalised_as_in_the_run(tmp_path, pictures):
    write_pictures(pictures, tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    mode = "L" if pictures.channels == 1 else "RGB"
    large = np.random.default_rng(0).integers(0, 256, (11, 13, 3), dtype=np.uint8)
    picture = Image.fromarray(large).convert(mode)
    small = np.asarray(picture.resize((6, 6), Image.Resampling.BICUBIC)).reshape(6, 6, -1)
    pixels = torch.from_numpy(small.copy()).permute(2, 0, 1)[None].float()
    expected = Normalisation(pictures.mean, pictures.std, torch.device("cpu"), torch.float32)(pixels)
    found = processor(picture, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_processor_that_gives_other_pixels_is_refused(tmp_path):
    write_pictures(GREY, tmp_path)
    path = tmp_path / "preprocessor_config.json"
    for change in ({"image_mean": [0.31]}, {"do_rescale": False}, {"size": {"height": 5, "width": 6}}):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(UserError, match="does not give the pixels"):
            check_pictures(GREY, tmp_path)


@pytest.mark.parametrize("kind", ["text", "tokens", "language"])
@pytest.mark.parametrize("make", [byte_tokenizer, word_tokenizer])
def test_a_tokenizer_of_our_own_is_loaded_again_beside_any_model(tmp_path, make, kind):
    """BERT has a tokenizer class of its own, which transformers would take for a folder without files."""
    BertConfig().save_pretrained(tmp_path)
    own = make()
    write_tokenizer(Texts(own, 24, kind), tmp_path, [own("a b").input_ids])
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(found), found.model_max_length) == (len(own), 24)
    assert found.truncation_side == found.padding_side == ("left" if kind == "language" else "right")
    text = "fever " * 30
    end = [own.eos_token_id] if own.eos_token_id is not None else []
    if kind == "language":  # a prompt does not end
        assert found("fever")["input_ids"] == own("fever", add_special_tokens=False)["input_ids"]
        assert found.decode(found(text, truncation=True)["input_ids"]).endswith("fever ") or not end
    else:
        assert found(text, truncation=True) == own(text, truncation=True, max_length=24)
    assert list(found("x")) == ["input_ids", "attention_mask"]


def test_a_tokenizer_that_would_read_otherwise_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer cannot be written.*it makes other tokens"):
        write_tokenizer(Texts(ByT5Tokenizer(), 24, "language"), tmp_path)  # it always adds an end
    texts = Texts(byte_tokenizer(), 24, "text")
    write_tokenizer(texts, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 48}))
    with pytest.raises(UserError, match="forgets its length"):
        check_tokenizer(texts, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(UserError, match="transformers cannot load it"):
        check_tokenizer(texts, tmp_path)
