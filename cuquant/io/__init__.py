"""Files: GGUF models, read lazily and written atomically."""
