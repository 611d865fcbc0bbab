"""Stores around other stores: tiers, and the configuration that names them."""
