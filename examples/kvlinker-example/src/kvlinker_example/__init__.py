"""The smallest complete plugin: the template for new ones."""
