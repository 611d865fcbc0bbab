"""kvlinker links the device KV pools of an LLM engine straight to an external KV store."""

__version__ = "0.1.0"
