"""The draft model: a block of tokens proposed at once, corrected left to right, and judged."""
