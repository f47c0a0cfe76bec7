"""Packages by explicit list: ``megatron`` is a namespace shared with megatron-core's wheel.

Automatic discovery would add a ``megatron/__init__.py``-style package or claim upstream's
folders; naming the roots keeps the wheel to our own two packages.
"""

from setuptools import find_namespace_packages, setup

# Byte code that happens to lie in the sources is no package.
NO_PACKAGES = ["*.__pycache__", "*.__pycache__.*"]

setup(
    packages=[
        *find_namespace_packages(
            include=["megatron.resilience", "megatron.resilience.*"], exclude=NO_PACKAGES
        ),
        *find_namespace_packages(include=["resihp_ext", "resihp_ext.*"], exclude=NO_PACKAGES),
    ],
    package_data={
        "megatron.resilience": ["py.typed"],
        "megatron.resilience.presets": ["*.args"],  # a folder of data is a namespace package
        "resihp_ext": ["py.typed"],
    },
)
