"""What embeddings are worth."""
