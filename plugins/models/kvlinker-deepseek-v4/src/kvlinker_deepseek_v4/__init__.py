"""DeepSeek V4: window, compressed KV, indexer and state rings as one pool group."""
