"""Packages by explicit list: ``megatron`` is a namespace shared with megatron-core's wheel.

Automatic discovery would add a ``megatron/__init__.py``-style package or claim upstream's
folders; naming the roots keeps the wheel to our own two packages.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["megatron.resilience", "megatron.resilience.*"]),
        *find_namespace_packages(include=["resihp_ext", "resihp_ext.*"]),
    ],
    package_data={"megatron.resilience": ["presets/*.args"]},
)
