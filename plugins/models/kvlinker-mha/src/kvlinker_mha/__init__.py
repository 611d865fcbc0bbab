"""Multi-head and grouped-query attention: one K and one V buffer per layer."""
