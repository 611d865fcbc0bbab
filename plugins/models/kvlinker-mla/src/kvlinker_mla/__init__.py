"""Multi-head latent attention: one compressed KV buffer per layer."""
