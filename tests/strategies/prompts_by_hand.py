"""Prompt learning written out by hand, to compare runs with."""

import torch
from torch.nn import functional

from fedfrozen_app.local.batches import batches
from tests.strategies.dual import TEXT_TOKENS, WORDS

LR = 0.1
TEXT = [word for word in WORDS if not word.startswith(("strategy", "num_clients"))]
COMMON = [*TEXT, f"strategy.text_tokens={TEXT_TOKENS}", "model.dtype=float64", "num_clients=3"]
# One full batch and one step of plain gradient descent; with this seed two of three clients take part.
BY_HAND = ["num_rounds=1", "participation=0.67", "client.local_epochs=1", "client.batch_size=1000"]


class ByHand:
    """The frozen CLIP's own parts, and nothing of ours."""

    def __init__(self, worker):
        self.worker, self.clip = worker, worker.model.backbone.model
        self.classes = worker.corpus.classes

    def texts(self, context=None):
        """(classes, width): each class read alone, so that nothing is padded."""
        found, tower = [], self.clip.text_model
        for name in self.classes:
            text = f"{name}." if context is not None else f"a photo of a {name}."
            ids = torch.tensor([*(byte + 3 for byte in text.encode()), 1])  # ByT5: bytes from 3 on, 1 ends
            read = tower.embeddings.token_embedding(ids)
            read = read if context is None else torch.cat([context, read])
            read = (read + tower.embeddings.position_embedding.weight[: len(read)]).unsqueeze(0)
            mask = torch.full((read.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None]
            hidden = tower.encoder(inputs_embeds=read, attention_mask=mask).last_hidden_state
            found.append(self.clip.text_projection(tower.final_layer_norm(hidden)[0, -1]))
        return functional.normalize(torch.stack(found), dim=-1)

    def batch(self, client):
        (rows,) = batches(self.worker.rows(client).train, self.worker.config.client, 0, client, 1)
        table = self.worker.corpus.train
        pixels = self.worker.task.prepare({"pixel_values": table.inputs["pixel_values"][rows]})
        return pixels["pixel_values"], table.labels[rows]

    def hidden(self, pixels):
        """(batch, 1 + patches, projected width), each of length 1."""
        tower = self.worker.model.backbone._vision
        states = tower.post_layernorm(tower(pixel_values=pixels).last_hidden_state)
        return functional.normalize(self.clip.visual_projection(states), dim=-1)

    @property
    def scale(self):
        return self.clip.logit_scale.exp()
