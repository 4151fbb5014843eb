"""Draft models on disk: our own bundle with its gate, and the formats of others."""
