"""A model behind an HTTP API on loopback: OpenAI's, and one with tokens in and out."""
