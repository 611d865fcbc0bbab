"""Builds the C files; what else there is to say stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    packages=["kvlinker_native"],
    package_dir={"": "src"},
    package_data={"kvlinker_native": ["py.typed"]},
    # Not a module of Python: it is loaded with ctypes, needs no header of Python, and may be missing.
    ext_modules=[
        Extension(
            "kvlinker_native.ranges",
            sources=["src/kvlinker_native/ranges.c", "src/kvlinker_native/fused.c"],
            depends=["src/kvlinker_native/fused.h"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
