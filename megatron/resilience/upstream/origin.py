"""Where ``megatron`` comes from: the installed wheel, or something that shadows it.

A Megatron-LM checkout on the path would silently train other code than the one that was tested; one
stray ``megatron/__init__.py`` hides ``megatron.core`` or this project.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from resihp_ext.errors import UserError


def wheel_folder() -> Path:
    """Folder that the installed megatron-core wheel put ``megatron/`` into.

    Raises:
        UserError: megatron-core is not installed.
    """
    try:
        distribution = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "megatron-core is not installed in this Python; run `make .venv`, or "
            "`pip install 'megatron-core>=0.19.2,<0.20'`"
        ) from error
    return Path(str(distribution.locate_file(""))).resolve()


def require_wheel() -> None:
    """Checks that Megatron will be imported from the wheel, without importing it.

    Raises:
        UserError: it comes from elsewhere; the line names both places.
    """
    wheel = wheel_folder()
    for name in ("megatron.core", "megatron.training"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or not origin.is_relative_to(wheel):
            raise UserError(
                f"{name} comes from {origin or 'nowhere'}, not from the wheel in {wheel}; "
                "remove the checkout from PYTHONPATH and the working directory"
            )
