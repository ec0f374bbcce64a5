"""Wrappers of pretrained models: LoRA, prompts, dual encoders, and rules that aggregate adapters."""
