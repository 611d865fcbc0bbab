"""The demo: one process reads a text and stores its KV, another one restores it and goes on writing."""
