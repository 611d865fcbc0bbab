"""DeepSeek sparse attention: latent KV and indexer keys, stored and restored together."""
