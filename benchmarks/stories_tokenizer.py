"""The tokenizer of llama2.c's models (stories15M) as transformers reads it: tokenizer.bin to tokenizer.json.

    python benchmarks/stories_tokenizer.py tokenizer.bin DIR

tokenizer.bin has, after one number, for every token its score, its length and its bytes. It is LLaMA's own
vocabulary with spaces for the mark of a word's beginning. Its scores are the order of the merges: the pair
whose union scores highest is joined first.
"""

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = 256  # tokens of one byte each, after the special ones
WORD = "▁"  # a word's beginning


def pieces(data: bytes) -> Iterator[tuple[str, float]]:
    """Every token's text as LLaMA writes it, and its score."""
    place = struct.calcsize("<i")
    number = 0
    while place < len(data):
        score, length = struct.unpack_from("<fi", data, place)
        place += struct.calcsize("<fi")
        text = data[place : place + length]
        place += length
        if number < len(SPECIAL):
            yield SPECIAL[number], score
        elif number < len(SPECIAL) + BYTES:
            yield f"<0x{number - len(SPECIAL):02X}>", score
        else:
            yield text.decode().replace(" ", WORD), score
        number += 1


def merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    found = []
    for text, number in vocabulary.items():
        if number < len(SPECIAL) + BYTES:
            continue
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        own = [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
        found += [
            (scores[text], pair) for pair in sorted(own, key=lambda p: (vocabulary[p[0]], vocabulary[p[1]]))
        ]
    return [pair for _, pair in sorted(found, key=lambda item: -item[0])]


def tokenizer_of(data: bytes) -> PreTrainedTokenizerFast:
    read = list(pieces(data))
    vocabulary = {text: number for number, (text, _) in enumerate(read)}
    model = BPE(
        vocabulary, merges(vocabulary, dict(read)), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    found = Tokenizer(model)
    found.normalizer = normalizers.Sequence([normalizers.Prepend(WORD), normalizers.Replace(" ", WORD)])
    parts = [decoders.Replace(WORD, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found.decoder = decoders.Sequence(parts)
    found.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    found.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="tokenizer.bin")
    parser.add_argument("folder", type=Path, help="where tokenizer.json goes: beside the model")
    given = parser.parse_args()
    tokenizer_of(given.file.read_bytes()).save_pretrained(given.folder)


if __name__ == "__main__":
    main()
