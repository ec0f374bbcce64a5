"""A tiny random CLIP on the digits, for tests of prompts: real parts, built from a configuration."""

TEXT_WIDTH, VISION_WIDTH, TEXT_TOKENS, VISION_TOKENS = 16, 24, 3, 2
TOWER = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CLIP = {
    "projection_dim": 12,
    "text_config": {"hidden_size": TEXT_WIDTH, "vocab_size": 384, "max_position_embeddings": 40, **TOWER},
    "vision_config": {
        "hidden_size": VISION_WIDTH,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        **TOWER,
    },
}


def flat(node, prefix):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}.{key}")
        else:
            yield f"+{prefix}.{key}={value}"


RANDOM_CLIP = [
    "~model.config",
    "+model.config={}",
    "model.name=clip_random",
    "model.source=config",
    "model.model_type=clip",
    *flat(CLIP, "model.config"),
]
WORDS = [
    "strategy=pfeddc",
    *RANDOM_CLIP,
    "dataset.align=0",
    f"strategy.text_tokens={TEXT_TOKENS}",
    f"strategy.vision_tokens={VISION_TOKENS}",
    "strategy.heads=2",
    "num_clients=3",
    "num_rounds=2",
    "dataset.limit=90",
    "personal=false",
    "partition.min_size=8",
    "client.batch_size=16",
    "client.lr=0.1",
    "runtime.threads=1",
    "runtime.runner=sequential",
    "checkpoint.keep=9",
]
