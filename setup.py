"""Packages by explicit list: ``megatron`` is a namespace shared with megatron-core's wheel.

Automatic discovery would add a ``megatron/__init__.py``-style package or claim upstream's
folders; naming the roots keeps the wheel to our own two packages.
"""

from setuptools import find_namespace_packages, setup

# Folders of data alone (presets) and leftovers such as __pycache__ are no packages.
NO_PACKAGES = ["*.__pycache__", "*.__pycache__.*", "megatron.resilience.presets"]

setup(
    packages=[
        *find_namespace_packages(
            include=["megatron.resilience", "megatron.resilience.*"], exclude=NO_PACKAGES
        ),
        *find_namespace_packages(include=["resihp_ext", "resihp_ext.*"], exclude=NO_PACKAGES),
    ],
    package_data={
        "megatron.resilience": ["presets/*.args", "py.typed"],
        "resihp_ext": ["py.typed"],
    },
)
