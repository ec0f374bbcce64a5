"""Pack the encoders and PACS of benchmarks/pfeddc.py into a folder small enough to carry to another machine.

    python benchmarks/pfeddc_pack.py DEST --vision DINOV2 --text MINILM --data PACS

What is lost, so that everything fits into 40 MiB:
- Matrices are rounded to 6 bits, with a scale for every 64 numbers of a row; vectors to float16.
- Of the text encoder's word table only the rows stay that the class names and templates need.
- Pictures are scaled to --size pixels and written as WebP.
`about.json` in DEST says how far the packed encoders' outputs are from the originals'.
"""

import argparse
import io
import json
import lzma
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import load, load_file, save
from transformers import AutoModel, AutoTokenizer

from fedfrozen_app.adapters.dual import spoken
from fedfrozen_app.align.train import TEMPLATES
from fedfrozen_app.models.silence_transformers import silence_transformers

LEVELS = 31  # 6 bits: -31..31
GROUP = 64
WORD_TABLE = "embeddings.word_embeddings.weight"


def pack_tensor(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.ndim < 2:
        return {f"{name}|half": tensor.half()}
    flat = tensor.float().flatten(1)  # (rows, columns)
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = (padded.abs().amax(dim=-1, keepdim=True) / LEVELS).clamp(min=1e-8).half()
    codes = (padded / scale.float()).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    shape = torch.tensor(tensor.shape)
    return {f"{name}|codes": codes.flatten(1), f"{name}|scale": scale.squeeze(-1), f"{name}|shape": shape}


def unpack_tensors(packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in packed.items():
        name, _, part = key.partition("|")
        if part == "half":
            found[name] = value.float()
        elif part == "codes":
            shape = packed[f"{name}|shape"].tolist()
            wide = value.float().unflatten(1, (-1, GROUP)) * packed[f"{name}|scale"].float().unsqueeze(-1)
            found[name] = wide.flatten(1)[:, : int(np.prod(shape[1:]))].reshape(shape).contiguous()
    return found


def pack_encoder(source: Path, target: Path, kept_rows: list[int] | None = None) -> None:
    """The folder's small files as they are, and its weights packed; `kept_rows` of the word table."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".txt") and file.name != "data_config.json":
            shutil.copy(file, target)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(WORD_TABLE) and kept_rows is not None:
            packed["rows"] = torch.tensor(kept_rows)
            packed["table"] = torch.tensor(tensor.shape)
            tensor = tensor[kept_rows]
        if tensor.is_floating_point():
            packed |= pack_tensor(name, tensor)
    (target / "weights.xz").write_bytes(lzma.compress(save(packed), preset=9))


def unpack_encoder(source: Path, target: Path) -> Path:
    """A folder for transformers' from_pretrained."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "weights.xz":
            shutil.copy(file, target)
    packed = load(lzma.decompress((source / "weights.xz").read_bytes()))
    tensors = unpack_tensors(packed)
    for name in tensors:
        if name.endswith(WORD_TABLE) and "rows" in packed:
            table = torch.zeros(packed["table"].tolist())
            table[packed["rows"]] = tensors[name]
            tensors[name] = table
    (target / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    return target


def pack_pictures(source: Path, target: Path, size: int, quality: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("*.parquet")):
        table = pq.read_table(file)
        cells = []
        for cell in table["image"].to_pylist():
            image = Image.open(io.BytesIO(cell["bytes"])).convert("RGB").resize((size, size), Image.BICUBIC)
            data = io.BytesIO()
            image.save(data, "WEBP", quality=quality, method=4)
            cells.append({"bytes": data.getvalue(), "path": None})
        images = pa.array(cells, type=table.schema.field("image").type)
        kept = table.select(["image", "label"]).set_column(0, table.schema.field("image"), images)
        pq.write_table(kept, target / file.name)


def used_tokens(text: Path, data: Path) -> list[int]:
    """Every token of the class names in every template, and the special ones."""
    tokenizer = AutoTokenizer.from_pretrained(text, local_files_only=True)
    metadata = pq.read_schema(next(iter(sorted(data.glob("*.parquet"))))).metadata[b"huggingface"]
    names = [spoken(name) for name in json.loads(metadata)["info"]["features"]["label"]["names"]]
    sentences = [template.format(name) for template in (*TEMPLATES, "{}.") for name in names]
    found = {token for row in tokenizer(sentences)["input_ids"] for token in row}
    return sorted(found | set(tokenizer.all_special_ids))


@torch.no_grad()
def likeness(original: Path, packed: Path, inputs: dict[str, torch.Tensor]) -> float:
    """Mean cosine between the two encoders' outputs for the same inputs."""
    with silence_transformers():
        pair = [AutoModel.from_pretrained(path, local_files_only=True).eval() for path in (original, packed)]
    one, other = (model(**inputs).last_hidden_state.mean(dim=1) for model in pair)
    return float(torch.nn.functional.cosine_similarity(one, other).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dest", type=Path)
    parser.add_argument("--vision", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=int, default=112, help="pixels a side (default 112)")
    parser.add_argument("--quality", type=int, default=55, help="of WebP (default 55)")
    given = parser.parse_args()
    kept = used_tokens(given.text, given.data)
    pack_encoder(given.vision, given.dest / "vision")
    pack_encoder(given.text, given.dest / "text", kept)
    pack_pictures(given.data, given.dest / "pacs", given.size, given.quality)
    with tempfile.TemporaryDirectory() as folder:
        vision = unpack_encoder(given.dest / "vision", Path(folder) / "vision")
        text = unpack_encoder(given.dest / "text", Path(folder) / "text")
        noise = torch.randn(8, 3, given.size, given.size, generator=torch.Generator().manual_seed(0))
        words = AutoTokenizer.from_pretrained(given.text)(["a photo of a dog."], return_tensors="pt")
        about = {
            "vision_cosine_on_noise": likeness(given.vision, vision, {"pixel_values": noise}),
            "text_cosine": likeness(given.text, text, dict(words)),
            "word_rows_kept": len(kept),
            "size": given.size,
            "webp_quality": given.quality,
        }
    (given.dest / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    total = sum(file.stat().st_size for file in given.dest.rglob("*") if file.is_file())
    print(json.dumps({**about, "MiB": round(total / 2**20, 1)}))


if __name__ == "__main__":
    main()
