"""Reads a checkpoint's ``.metadata`` without trusting it and without importing torch.

``.metadata`` is a pickle. Unpickling it with the standard unpickler would run whatever a damaged
or malicious file asks for. Here every class that the format uses is replaced by an inert stand-in
that only keeps its fields, and any other name is refused.

Promise: reading never imports a module or calls a function named by the file. A file that does
not describe a consistent checkpoint raises :class:`MetadataError` with one line. The stand-ins
follow ``torch.distributed.checkpoint`` (metadata version 1.0.0) and Megatron's older additions.
"""

import io
import math
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METADATA_FILE = ".metadata"

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    "float8_e8m0fnu": 1,
}
"""Bytes of one element, by torch dtype name."""


class MetadataError(Exception):
    """The metadata file cannot be used; the text completes "FILE ..." in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredItem:
    """One tensor chunk or object: a byte range of one file that holds a torch.save archive."""

    file: str
    offset_bytes: int
    length_bytes: int
    label: str
    """Logical name, with the chunk's offset in the logical tensor for tensors."""
    least_data_bytes: int
    """Bytes of tensor data that the archive must hold at least; 0 for objects."""
    transformed: bool
    """Written through a storage transform (compression): not a plain archive."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A global that carries no structure of its own, such as a dtype."""

    name: str


class _Record:
    """Keeps the fields of an object of the metadata format; runs nothing."""

    state: Any = None  # unpickling may skip __init__

    def __init__(self, *_arguments: object) -> None:
        """Accept and drop what the original class would be called with."""

    def field(self, name: str) -> Any:
        """The named field.

        Raises:
            MetadataError: the object does not have it.
        """
        if not isinstance(self.state, dict) or name not in self.state:
            kind = type(self).__name__.lstrip("_")
            raise MetadataError(f"is damaged: a {kind} lacks its field {name!r}")
        return self.state[name]


class _Metadata(_Record): ...


class _MetadataIndex(_Record): ...


class _StorageInfo(_Record): ...


class _TensorStorage(_Record): ...


class _Chunk(_Record): ...


class _Properties(_Record):
    """State is a tuple that begins with the dtype."""


class _Size(tuple[int, ...]):
    __slots__ = ()


_DCP = "torch.distributed.checkpoint."
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_STAND_INS: dict[tuple[str, str], Callable[..., object]] = {
    (_DCP + "metadata", "Metadata"): _Metadata,
    (_DCP + "metadata", "MetadataIndex"): _MetadataIndex,
    (_DCP + "metadata", "TensorStorageMetadata"): _TensorStorage,
    (_DCP + "metadata", "ChunkStorageMetadata"): _Chunk,
    (_DCP + "metadata", "TensorProperties"): _Properties,
    (_DCP + "metadata", "BytesStorageMetadata"): _Record,
    (_DCP + "metadata", "StorageMeta"): _Record,
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"): _Record,
    (_DCP + "filesystem", "_StorageInfo"): _StorageInfo,
    (_DCP + "filesystem", "_StoragePrefix"): _Record,
    (_DCP + "planner", "SavePlan"): _Record,
    (_DCP + "planner", "WriteItem"): _Record,
    (_DCP + "planner", "WriteItemType"): _Record,
    (_DCP + "planner", "TensorWriteData"): _Record,
    (_DCP + "planner", "BytesIOWriteData"): _Record,
    # torch before 2.3 kept the tensor properties here.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Record,
    (_MCORE, "MCoreMetadata"): _Metadata,
    (_MCORE, "MCoreSavePlan"): _Record,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): dict,
    **{("pathlib", name): _Record for name in ("PosixPath", "PurePosixPath", "Path")},
    **{("pathlib._local", name): _Record for name in ("PosixPath", "PurePosixPath", "Path")},
}

_BROKEN_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,  # includes UnicodeDecodeError
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
    struct.error,
)
"""What the unpickler raises for bytes that are not a whole, well-formed pickle."""


_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE),
    *(pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.EMPTY_TUPLE, pickle.TUPLE),
    *(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND),
    *(pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)
"""What pickling plain data with protocols 2 to 5 writes; anything else is damage."""


class _SafeUnpickler(pickle._Unpickler):
    """The standard library's unpickler in Python, reduced to inert data.

    The C one is six times faster, but allocates memory for any memo index that a damaged byte
    asks for: one flipped byte of ``.metadata`` made it ask for 60 GB and be killed.
    """

    dispatch = {op[0]: pickle._Unpickler.dispatch[op[0]] for op in _OPCODES}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return _Name(name)
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise MetadataError(
                f"asks for {module}.{name}, which checkpoint metadata never needs: refused, "
                "because loading it could run foreign code"
            ) from None

    def _load_build(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state, target = stack.pop(), stack[-1]
        # The inherited rule would set attributes of whatever is on the stack, classes included.
        if not isinstance(target, _Record):
            raise pickle.UnpicklingError("state for an object that has none")
        target.state = state

    dispatch[pickle.BUILD[0]] = _load_build  # type: ignore[assignment]


def read_items(directory: Path) -> tuple[StoredItem, ...]:
    """List every stored item of the checkpoint in ``directory``, sorted by file and offset.

    Raises:
        MetadataError: the file is torn, foreign or inconsistent.
        OSError: the file cannot be opened or read.
    """
    content = (directory / METADATA_FILE).read_bytes()
    if not content:
        raise MetadataError("is empty")
    try:
        root = _SafeUnpickler(io.BytesIO(content)).load()
    except _BROKEN_PICKLE as error:
        raise MetadataError(
            f"is torn or damaged ({type(error).__name__} after {len(content)} bytes)"
        ) from None
    try:
        items = tuple(_items(root))
    except (TypeError, ValueError, OverflowError) as error:
        raise MetadataError(f"is damaged: {error}") from None
    return tuple(sorted(items, key=lambda item: (item.file, item.offset_bytes)))


def _items(root: object) -> Iterator[StoredItem]:
    if not isinstance(root, _Metadata):
        raise MetadataError("does not hold checkpoint metadata")
    tensors = _mapping(root.field("state_dict_metadata"), "state_dict_metadata")
    stored = _mapping(root.field("storage_data"), "storage_data")
    chunk_bytes = dict(_chunks(tensors))
    for index, info in stored.items():
        name, offset = _index_fields(index)
        if name not in tensors:
            raise MetadataError(f"is damaged: it stores {name!r} without describing it")
        expected_bytes = 0
        if isinstance(tensors[name], _TensorStorage):
            if (name, offset) not in chunk_bytes:
                raise MetadataError(
                    f"is damaged: {name!r} has no chunk at offset {list(offset or ())}"
                )
            expected_bytes = chunk_bytes.pop((name, offset))
        yield _stored_item(info, _label(name, offset), expected_bytes)
    for name, offset in chunk_bytes:
        raise MetadataError(f"is damaged: no bytes are stored for {_label(name, offset)}")
    _require_every_object(tensors, stored)


def _require_every_object(tensors: dict[Any, Any], stored: dict[Any, Any]) -> None:
    stored_names = {_index_fields(index)[0] for index in stored}
    for name in tensors:
        if name not in stored_names and not isinstance(tensors[name], _TensorStorage):
            raise MetadataError(f"is damaged: no bytes are stored for {name!r}")


def _chunks(tensors: dict[Any, Any]) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], int]]:
    """Yield ``((name, offset), least bytes)`` of every chunk; check that chunks fill tensors."""
    for name, storage in tensors.items():
        if not isinstance(name, str):
            raise MetadataError(f"is damaged: {name!r} is not a tensor name")
        if not isinstance(storage, _TensorStorage):
            continue
        item_bytes = _item_bytes(storage.field("properties"))
        elements = 0
        for chunk in storage.field("chunks"):
            if not isinstance(chunk, _Chunk):
                raise MetadataError(f"is damaged: {name!r} has a chunk that is not one")
            offsets, sizes = _shape(chunk.field("offsets")), _shape(chunk.field("sizes"))
            elements += math.prod(sizes)
            yield (name, offsets), math.prod(sizes) * item_bytes
        if elements < math.prod(_shape(storage.field("size"))):
            raise MetadataError(f"is damaged: the chunks of {name!r} do not fill it")


def _item_bytes(properties: object) -> int:
    state = properties.state if isinstance(properties, _Properties) else None
    if isinstance(state, dict):  # older torch pickled a plain dictionary
        state = (state.get("dtype"),)
    if not isinstance(state, tuple) or not state or not isinstance(state[0], _Name):
        raise MetadataError("is damaged: a tensor has no known dtype")
    return ITEM_BYTES[state[0].name]


def _stored_item(info: object, label: str, expected_bytes: int) -> StoredItem:
    if not isinstance(info, _StorageInfo):
        raise MetadataError(f"is damaged: {label} has no place in a file")
    file = info.field("relative_path")
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
        raise MetadataError(f"is damaged: {label} names {file!r}, not a file beside it")
    offset_bytes, length_bytes = info.field("offset"), info.field("length")
    if not _is_count(offset_bytes) or not _is_count(length_bytes):
        raise MetadataError(f"is damaged: {label} has no valid byte range in {file}")
    return StoredItem(
        file=file,
        offset_bytes=offset_bytes,
        length_bytes=length_bytes,
        label=label,
        least_data_bytes=expected_bytes,
        transformed=bool(info.state.get("transform_descriptors")),
    )


def _index_fields(index: object) -> tuple[str, tuple[int, ...] | None]:
    if not isinstance(index, _MetadataIndex):
        raise MetadataError("is damaged: storage_data has a key that is not an index")
    # The class default None is not in the state of an index that was made without an offset.
    name, offset = index.field("fqn"), index.state.get("offset")
    if not isinstance(name, str):
        raise MetadataError(f"is damaged: {name!r} is not a tensor name")
    return name, None if offset is None else _shape(offset)


def _label(name: str, offset: tuple[int, ...] | None) -> str:
    return name if offset is None else f"{name}{list(offset)}"


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(_is_count(extent) for extent in value):
        raise MetadataError("is damaged: a shape or offset is not a tuple of whole numbers")
    return tuple(value)


def _mapping(value: object, name: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MetadataError(f"is damaged: {name} is not a mapping")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
