"""A transformers model whose decoder layers are remote, and how it decodes."""
