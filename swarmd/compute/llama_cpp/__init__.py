"""llama.cpp's own library as a second engine, for models that are published as GGUF."""
