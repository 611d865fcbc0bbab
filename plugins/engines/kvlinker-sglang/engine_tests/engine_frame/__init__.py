"""What engine tests stand on: tiny models, real servers and their client, real pools and prefix trees.

README.md beside this package says which module has what.
"""
