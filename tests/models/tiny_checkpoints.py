"""Tiny language models, written as checkpoints that a run loads."""

import torch
import transformers

D, LAYERS, ROUNDS, CLIENTS = 16, 2, 4, 3
BERT = transformers.BertConfig(
    vocab_size=384, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=32
)
LLAMA = transformers.LlamaConfig(
    **{"vocab_size": 384, "hidden_size": D, "num_hidden_layers": LAYERS, "intermediate_size": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
)
GPT2 = transformers.GPT2Config(vocab_size=384, n_embd=D, n_layer=LAYERS, n_head=2, pad_token_id=0)


def checkpoint(config, folder):
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder
