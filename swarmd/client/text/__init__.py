"""Text to tokens and back: a model's own tokenizer and chat templates, run apart."""
