"""What wraps a pretrained model: LoRA, prompts, dual encoders, and the rules that combine adapters."""
