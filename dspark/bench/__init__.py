"""What is measured about a run: acceptance from its rounds, speed from interleaved runs."""
