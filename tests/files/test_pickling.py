"""Records, of which a pickle has many, are written as any other object of their class."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.core.checkpoint.inert import Foreign, Global
from zckpt.files.pickling import Record, Repeated, dumps

FORM = Global("package.module.Class"), ("key", "size")


def as_record(*values: Any) -> Record:
    return Record(FORM, values)


def as_object(*values: Any) -> Foreign:
    return Foreign.instance(FORM[0].name, **dict(zip(FORM[1], values, strict=True)))


@pytest.mark.parametrize("before", [0, 300])  # numbers of one byte, and of four
def test_records_are_objects(before: int) -> None:
    texts = [f"text {number}" for number in range(before)]
    shared = Repeated([1, "shared"])

    def written(make: Any) -> bytes:
        inner = Repeated(make("inner", shared))
        objects = [make("a", 1), make("b", None), make("a", inner), make("c", inner), inner]
        return dumps([texts, objects, "key", FORM[0]], lambda _: None)

    assert written(as_record) == written(as_object)
