"""The user of models: sessions over a chain of servers, and a transformers model on top of them."""
