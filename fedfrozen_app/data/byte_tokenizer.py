"""Bytes as tokens, in ByT5's numbering: padding, end and unknown, then the 256 bytes, then 125 spare tokens.

transformers' own `ByT5Tokenizer` gives the same numbers. This one is written in the `tokenizers` library, so
that it can be saved as one tokenizer.json, and knows which characters a token stands for.
"""

from functools import cache

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SPARE = 125


def byte_tokenizer() -> PreTrainedTokenizerFast:
    signs = _signs()
    vocabulary = {PAD: 0, END: 1, UNKNOWN: 2} | {sign: 3 + byte for byte, sign in enumerate(signs)}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, 1)]
    )
    # ByT5 takes the spaces around its first three with them.
    special = [AddedToken(name, lstrip=True, rstrip=True, special=True) for name in (PAD, END, UNKNOWN)]
    spare = [AddedToken(f"<extra_id_{number}>", special=True) for number in range(SPARE)]
    tokenizer.add_special_tokens([*special, *spare])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[1],
        unk_token=special[2],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


@cache
def _signs() -> tuple[str, ...]:
    """The printable sign by which the library writes each byte: itself, or one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))
