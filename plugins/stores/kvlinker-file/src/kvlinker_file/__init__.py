"""Embedded file store: pages in slab files of one directory."""
