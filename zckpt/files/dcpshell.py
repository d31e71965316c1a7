"""What does zckpt write as `.metadata`: the object that torch.distributed.checkpoint pickles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.inert import Foreign, Global, Size
from .dcpfile import VERSION, ItemKey, ItemLocation, Items, TensorItem


def metadata(
    items: Items,
    paths: Mapping[str, tuple[Any, ...]],
    locations: Iterable[tuple[ItemKey, ItemLocation]],
    **others: Any,
) -> Foreign:
    """The object to pickle as `.metadata`; files of locations are relative to its folder.

    `paths` are the keys that lead to each item in the program's state dict. torch ignores `others`.
    """
    return _record(
        "metadata.Metadata",
        state_dict_metadata={key: _item_record(item) for key, item in items.items()},
        planner_data=paths,
        storage_data={
            _record(
                "metadata.MetadataIndex",
                fqn=key,
                offset=None if offsets is None else Size(offsets),
                index=None,
            ): _record(
                "filesystem._StorageInfo",
                relative_path=location.file,
                offset=location.offset,
                length=location.length,
            )
            for (key, offsets), location in locations
        },
        storage_meta=None,
        version=VERSION,
        **others,
    )


def _item_record(item: TensorItem | None) -> Foreign:
    if item is None:
        return _record("metadata.BytesStorageMetadata")
    properties = _record("metadata.TensorProperties")
    properties.state = (
        Global(f"torch.{item.torch_dtype}"),
        Foreign(Global("torch.serialization._get_layout"), ("torch.strided",)),
        False,
        Foreign(Global("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    return _record(
        "metadata.TensorStorageMetadata",
        properties=properties,
        size=Size(item.shape),
        chunks=[
            _record(
                "metadata.ChunkStorageMetadata", offsets=Size(box.offsets), sizes=Size(box.sizes)
            )
            for box in item.boxes
        ],
    )


def _record(name: str, **state: Any) -> Foreign:
    """An object of one of torch.distributed.checkpoint's dataclasses."""
    return Foreign(Global(f"torch.distributed.checkpoint.{name}"), (), state or None, "new")
