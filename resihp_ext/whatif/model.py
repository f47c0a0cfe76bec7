"""The model in question: a known one, a file of sizes, or sizes alone.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from resihp_ext.cost.model_shape import MODELS, ModelShape, padded_vocabulary
from resihp_ext.whatif.keys import MODEL_KEYS
from resihp_ext.whatif.settings import Settings, read_file

FIELDS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "attention_heads",
    "query-groups": "query_groups",
    "vocab": "vocab_size",
    "seq-length": "seq_length",
    "micro-batch-size": "micro_batch_size",
}
"""Each size by its key, and as :class:`ModelShape` calls it."""
LARGEST = {"layers": 10_000}
"""Beyond that it is a slip, and would take long to refuse otherwise."""
REQUIRED = ("layers", "hidden", "ffn", "heads", "vocab")
"""Sizes without a default."""
SWITCHES = {"gated": True, "tied": False, "qkv-bias": False}
"""What only a file of a model can say, with its default."""


def model_shape(settings: Settings) -> ModelShape:
    """The model with all sizes that were given in its place.

    Raises:
        UserError: no such model, a size that is lacking, or sizes that do not fit.
    """
    base = _base(settings)
    own = _sizes(settings)
    fields: dict[str, Any] = {"name": "custom", "seq_length": 8192, **base, **own}
    ungrouped = base.get("query_groups") in (None, base.get("attention_heads"))
    if "query_groups" not in own and ungrouped:
        fields["query_groups"] = fields.get("attention_heads")
    lacking = [f"--{key}" for key in REQUIRED if FIELDS[key] not in fields]
    if lacking:
        raise settings.error(
            "model", f"give one of {', '.join(MODELS)}, a YAML file, or also {', '.join(lacking)}"
        )
    try:
        return ModelShape(**fields)
    except ValueError as error:
        raise settings.error("model", str(error)) from error


def _base(settings: Settings) -> dict[str, Any]:
    name = settings.text("model")
    if name is None:
        return {}
    if name in MODELS:
        return asdict(MODELS[name])
    path = settings.folder("model") / name
    if path.suffix not in (".yaml", ".yml", ".json") and not path.is_file():
        raise settings.error(
            "model",
            f"{name!r} is unknown; choose one of {', '.join(MODELS)}, or a YAML file of sizes",
        )
    return _from_file(path)


def _from_file(path: Path) -> dict[str, Any]:
    names = [*(key.name for key in MODEL_KEYS), *SWITCHES, "name"]
    found = Settings(read_file(path, names))
    switches = {
        key.replace("-", "_"): found.switch(key, default) for key, default in SWITCHES.items()
    }
    return {"name": found.text("name") or path.stem, **switches, **_sizes(found)}


def _sizes(settings: Settings) -> dict[str, int]:
    found = {name: settings.whole(key, most=LARGEST.get(key)) for key, name in FIELDS.items()}
    sizes = {name: size for name, size in found.items() if size is not None}
    if "vocab_size" in sizes:
        sizes["vocab_size"] = padded_vocabulary(sizes["vocab_size"])
    return sizes
