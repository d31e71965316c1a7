"""Reads the chunks of tensors and the locations of items from `.metadata`, as columns.

    chunk            offsets, sizes                      of a tensor's box
    index -> info    key, offsets -> file, offset, length    of an item

There may be millions of chunks and locations, and pickle writes each with the same 25 instructions.
This module recognizes such a sequence by a pattern, called a form, and stores a row: a few numbers
instead of four to six objects, which take 2 to 4 KB. Anything else is left to the unpickler,
instruction by instruction. Both ways give the same result: a form ends where its object ends, a row
stands for exactly this object, and it enters a column only when the pickle puts it into a list or a
dictionary.

The pickle may number values within a form (its memo), and refer to them later. Boxes, indices, and
the sizes and texts in them can be recalled by their numbers. If a pickle refers to another part of
a form, or numbers values in another way, `Unusual` is raised. The caller then starts again without
rows.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ..core.checkpoint.inert import Foreign, Global, Size

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
TENSOR = f"{METADATA_MODULE}.TensorStorageMetadata"
CHUNK = f"{METADATA_MODULE}.ChunkStorageMetadata"
INDEX = f"{METADATA_MODULE}.MetadataIndex"
PROPERTIES = f"{METADATA_MODULE}.TensorProperties"
INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
PLACE_WORDS = [
    *("fqn", "offset", "index"),
    Global(INFO),
    *("relative_path", "offset", "length"),
]
MOST_KNOWN = 1 << 20  # sizes in their pickled form that are remembered

# instructions: a reference to a numbered value, and an integer
_REF = rb"(?:h.|j....)"
_LONG = b"|".join(rb"\x8a\x%02x.{%d}" % (length, length) for length in range(1, 9))
_INT = rb"(?:K.|M..|J....|%b)" % _LONG


def _form(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


_INTEGERS = _form(_INT)


class _Forms:
    """Regular expressions for the pickled bytes of a chunk, an index or a location.

    `number` is the opcode MEMOIZE, by which protocol 4 numbers values; it is empty for lower
    protocols, such as zckpt's.
    """

    def __init__(self, number: bytes) -> None:
        words = {
            b"REF": _REF, b"INT": _INT, b"#": number,
            b"SHAPE": rb"(?:(REF)(TUPLE)ONE#R#|(TUPLE)|(REF))",
            b"TUPLE": rb"(?:\)|INT\x85#|INTINT\x86#|INTINTINT\x87#|\((?:INT){4,64}t#)",
            b"OBJECT": rb"\)\x81#\}#\(",  # with a dictionary, and the beginning of its items
            b"ONE": rb"\x85",
        }  # fmt: skip

        def form(pattern: bytes) -> re.Pattern[bytes]:
            for word in (b"SHAPE", b"TUPLE", b"OBJECT", b"ONE", b"INT", b"REF", b"#"):
                pattern = pattern.replace(word, words[word])
            return _form(pattern)

        self.chunk = form(rb"OBJECT(REF)SHAPE(REF)SHAPEub")
        self.index = form(rb"OBJECT(REF)(?:(REF)|\x8c(.))")
        self.index_rest = form(rb"(?:(REF)(N|INT))?(?:(REF)SHAPE)?(?:(REF)(N|INT))?ub")
        self.size = form(rb"(TUPLE)ONE#R#")
        self.properties = form(rb"\)\x81#\((REF)(REF)([\x88\x89])(REF)([\x88\x89])t#b")
        properties = rb"REF\)\x81\(REFREFREFONER[\x88\x89]REFINTONER[\x88\x89]tb"
        chunk = rb"REFOBJECTREFSHAPEREFSHAPEub"
        self.tensor = form(rb"OBJECTREF%bREFSHAPEREF\](?:\((?:%b){1,16}e)?ub" % (properties, chunk))
        info = rb"OBJECT(REF)(REF)(REF)(INT)(REF)(INT)"
        self.info = form(info + rb"(?:(REF)N)?ub")
        self.place = form(rb"OBJECT(REF)(REF)(REF)SHAPE(REF)Nub(REF)%bub" % info)


def _is_fixed(state: Any) -> bool:
    """Whether a tensor's description (`state`) is safe from changes by the rest of the pickle."""
    # layout and memory format are results of calls; a hostile pickle may change their arguments
    # between two descriptions with the same bytes
    properties = state.get("properties") if isinstance(state, dict) else None
    if not isinstance(properties, Foreign) or not isinstance(properties.state, tuple):
        return False
    calls = [value for value in properties.state if not isinstance(value, (Global, bool))]
    return all(
        isinstance(call, Foreign) and all(type(each) in (str, int) for each in call.arguments)
        for call in calls
    )


@lru_cache
def _forms_of(is_numbered: bool) -> _Forms:
    """The patterns for pickles that number their values (protocol 4), or for all others.

    They are compiled at the first call, because most commands need none.
    """
    return _Forms(b"\x94" if is_numbered else b"")


PROTOCOL = 4  # the protocol of pickles whose values are numbered


class Unusual(Exception):
    """The pickle has a structure that this module's patterns do not cover.

    It must be read by the unpickler alone.
    """


class IndexRow(Struct, frozen=True, gc=False, eq=False):
    """The key of an item and, for a chunk of a tensor, where the chunk begins.

    `offsets` is the index in `Rows.shapes` of the chunk's offsets along all axes. It is -1 if the
    pickle states no offsets.
    """

    key: str
    offsets: int


class InfoRow(Struct, frozen=True, gc=False):
    """The location of an item: its file, its first byte in the file, and its length."""

    file: str
    offset: int
    length: int


class Run(Struct, frozen=True, eq=False):
    """Rows `start` to `stop` (exclusive) of the columns in `Rows`, in place of objects.

    In a tensor's list of chunks, a `Run` replaces one chunk for each row. In the dictionary of
    locations, a single key `Run` with the value None replaces one key and value for each row.
    """

    start: int
    stop: int


class Rows:
    """The chunks of tensors and the locations of items in one pickle, as columns of numbers.

    An item's location is its file, first byte and length. Two columns have a row for each chunk,
    the others a row for each location. Most numbers are indices in the list `shapes` of all offsets
    and sizes, or in the list `names` of all keys and file names.

        box_offsets, box_sizes     a chunk (box): indices in `shapes`
        place_keys, place_files    an item's key and file: indices in `names`
        place_offsets              offsets of the item's chunk: index in `shapes`, or -1 for none
        offsets, lengths           the item's first byte in the file, and its length
    """

    def __init__(self, text: bytes) -> None:
        self.is_numbered = text[1:2] >= bytes([PROTOCOL])
        self.forms = _forms_of(self.is_numbered)
        self.shapes: list[tuple[int, ...]] = []
        self.box_offsets, self.box_sizes = array("i"), array("i")
        self.names: list[str] = []
        self.place_keys, self.place_offsets, self.place_files = array("i"), array("i"), array("i")
        self.offsets, self.lengths = array("q"), array("q")
        self.skipped = 0  # the count of values within forms that the pickle has numbered
        self._known_shapes: dict[bytes, int] = {}
        self._number_of: dict[str, int] = {}
        # the pickle's numbers, and the values that they stand for
        self._recalled, self._values = array("q"), array("q")
        self._box_numbers = array("q")
        self._index_numbers, self._index_keys = array("q"), array("i")
        self._index_offsets = array("i")
        self._words: dict[bytes, Any] = {}  # values of references that many forms contain
        self._forms = {
            CHUNK: self._chunk,
            INDEX: self._index,
            INFO: self._info,
            PROPERTIES: self._properties,
            TENSOR: self._tensor,
            "torch.Size": self._size,
        }
        # by their bytes, the tensors' descriptions; and the end and bytes of one that is being read
        self._tensors: dict[bytes, Foreign] = {}
        self._begun = (-1, b"")
        # references to the names of an index's and a place's attributes, which were looked up
        self._place_words: tuple[bytes, ...] = ()

    def match(self, cls: str, data: Any, position: int, memo: dict[int, Any]) -> Any:
        """Recognizes the object that the pickle `data` builds from `position` on.

            cls     the name of the object's class, which the pickle has just named
            memo    the unpickler's values by memo number

        Returns None if the object is not recognized. Otherwise returns a list of values for the
        unpickler's stack, and the position at which the object ends. The list has a `Run` for a
        chunk of a tensor, an `IndexRow` for an item's key, an `InfoRow` for the item's location,
        both for a key and a location together, or else the object itself.
        """
        form = self._forms.get(cls)
        return None if form is None else form(data, position, memo)

    def _count(self, count: int) -> None:
        """Counts memo numbers that the pickle gave to values which `recall` cannot return."""
        if self.is_numbered:
            self.skipped += count

    def recall(self, number: int) -> Any:
        """The value with this memo number, if the pickle wrote it as part of a recognized object.

        The unpickler's memo lacks such values, because `match` reads the object in one step. Raises
        Unusual if this class has not stored the value either.
        """
        if (place := _place(self._recalled, number)) is not None:
            value = self._values[place]
            return self.shapes[value] if value >= 0 else self.names[-1 - value]
        if (place := _place(self._box_numbers, number)) is not None:
            return Run(place, place + 1)
        if (place := _place(self._index_numbers, number)) is not None:
            return IndexRow(self.names[self._index_keys[place]], self._index_offsets[place])
        raise Unusual

    def forget_numbers(self) -> None:
        """Frees the memory used for memo numbers, once the pickle has been read to its end."""
        for numbers in (self._recalled, self._values, self._box_numbers, self._index_numbers):
            del numbers[:]
        del self._index_keys[:], self._index_offsets[:]

    # -- columns

    def boxes(self, run: Run) -> Iterator[tuple[int, int]]:
        """Yields two indices in `self.shapes` per chunk of `run`: of its offsets and its sizes."""
        rows = slice(run.start, run.stop)
        yield from zip(self.box_offsets[rows], self.box_sizes[rows], strict=True)

    def places(self, run: Run) -> Iterator[tuple[str, int, str, int, int]]:
        """Yields the key, offsets, file, first byte and length of each item in the rows `run`.

        For offsets, it yields their index in `self.shapes`; -1 if the pickle states no offsets.
        """
        names = self.names
        for row in range(run.start, run.stop):
            key, file = names[self.place_keys[row]], names[self.place_files[row]]
            yield key, self.place_offsets[row], file, self.offsets[row], self.lengths[row]

    def extend(self, target: list[Any], items: list[Any]) -> None:
        """Appends items to the list `target`; adjacent runs of chunks become one `Run`."""
        for item in items:
            if type(item) is Run and target:
                last = target[-1]
                if type(last) is Run and last.stop == item.start:
                    target[-1] = Run(last.start, item.stop)
                    continue
            target.append(item)

    def set_items(self, target: dict[Any, Any], flat: list[Any]) -> list[Any]:
        """Stores the locations in `flat` as rows; returns all other keys and values in `flat`.

        `flat` is a list of keys and values for the dictionary `target`: [key, value, key, ...].
        In place of the stored locations, `target` gets one key: the `Run` of their rows.
        """
        start, number_of = len(self.offsets), self._number_of
        rest: list[Any] = []
        for key, info in zip(flat[::2], flat[1::2], strict=False):
            if type(key) is not IndexRow or type(info) is not InfoRow:
                rest += (self._as_object(key), self._as_object(info))
                continue
            for name in (key.key, info.file):
                if name not in number_of:
                    number_of[name] = len(self.names)
                    self.names.append(name)
            self.place_keys.append(number_of[key.key])
            self.place_offsets.append(key.offsets)
            self.place_files.append(number_of[info.file])
            self.offsets.append(info.offset)
            self.lengths.append(info.length)
        if len(self.offsets) > start:
            target[Run(start, len(self.offsets))] = None
        return [*rest, *flat[len(flat) & ~1 :]]

    def _as_object(self, value: Any) -> Any:
        """Converts a row to the object that the unpickler would have made; keeps other values."""
        if type(value) is IndexRow:
            offsets = {} if value.offsets < 0 else {"offset": self.shapes[value.offsets]}
            return Foreign.instance(INDEX, fqn=value.key, **offsets)
        if type(value) is InfoRow:
            place = {"offset": value.offset, "length": value.length}
            return Foreign.instance(INFO, relative_path=value.file, **place)
        return value

    # -- forms

    def _size(self, data: Any, position: int, memo: dict[int, Any]) -> Any:
        match = self.forms.size.match(data, position)
        if match is None:
            return None
        number = self._number_of_shape(match[1])
        self._number(memo, number, b"", match[1], None)
        return [self.shapes[number]], match.end()

    def _properties(self, data: Any, position: int, memo: dict[int, Any]) -> Any:
        match = self.forms.properties.match(data, position)
        if match is None:
            return None
        properties = self._words.get(match[0])
        if properties is None:
            values = [self._value(ref, memo) for ref in (match[1], match[2], match[4])]
            dtype, layout, form = values
            state = (dtype, layout, match[3] == b"\x88", form, match[5] == b"\x88")
            properties = self._words[match[0]] = Foreign(Global(PROPERTIES), (), state, "new")
        if self.is_numbered:
            memo[len(memo) + self.skipped] = properties
        self._count(1)
        return [properties], match.end()

    def _tensor(self, data: Any, position: int, memo: dict[int, Any]) -> Any:
        """Returns a tensor's description if one with the same bytes was read before.

        None for the first such description: the unpickler reads it, and `build` may keep it.
        """
        match = None if self.is_numbered else self.forms.tensor.match(data, position)
        if match is None:
            return None
        known = self._tensors.get(match[0])
        # equal bytes refer to equal values: no memo number is given twice, and see `_is_fixed`
        if known is not None:
            return [known], match.end()
        self._begun = match.end(), match[0]
        return None

    def build(self, value: Foreign, state: Any, position: int) -> None:
        """Notes that the pickle gives the state `state` to the object `value`.

        `position` is the end of the instruction BUILD. Raises Unusual if `value` has a state
        already.
        """
        # the object may be kept for all tensors whose descriptions have the same bytes
        if value.state is not None:
            raise Unusual
        if position == self._begun[0] and _is_fixed(state):
            self._tensors[self._begun[1]] = value

    def _chunk(self, data: Any, position: int, memo: dict[int, Any]) -> Any:
        match = self.forms.chunk.match(data, position)
        if match is None:
            return None
        word, *first, other, cls, text, plain, ref = match.groups()
        own_cls, own_text, own_plain, own_ref = first
        if self._word(word, memo) != "offsets" or self._word(other, memo) != "sizes":
            return None
        offsets = self._shape(own_cls, own_text, own_plain, own_ref, memo)
        sizes = self._shape(cls, text, plain, ref, memo)
        if offsets is None or sizes is None:
            return None
        row = len(self.box_sizes)
        self.box_offsets.append(offsets)
        self.box_sizes.append(sizes)
        if self.is_numbered:
            self._box_numbers.append(len(memo) + self.skipped)
        self._count(2)  # the object and its dictionary
        self._number(memo, offsets, own_cls, own_text, own_plain)
        self._number(memo, sizes, cls, text, plain)
        return [Run(row, row + 1)], match.end()

    def _index_and_info(self, data: Any, position: int, memo: dict[int, Any]) -> Any:
        """Recognizes the key of an item together with its location, as zckpt writes them."""
        match = self.forms.place.match(data, position)
        if match is None:
            return None
        words = match.group(1, 3, 8, 9, 10, 12, 14)
        if words != self._place_words:
            if [self._word(ref, memo) for ref in words] != PLACE_WORDS:
                return None
            self._place_words = words
        key, file = self._value(match[2], memo), self._word(match[11], memo)
        cls, text, plain, size = match.group(4, 5, 6, 7)
        offsets = self._shape(cls, text, plain, size, memo)
        if type(key) is not str or type(file) is not str or offsets is None:
            return None
        place = InfoRow(file, _integer(match[13]), _integer(match[15]))
        return [IndexRow(key, offsets), place], match.end()

    def _index(self, data: Any, position: int, memo: dict[int, Any]) -> Any:
        if not self.is_numbered and (pair := self._index_and_info(data, position, memo)):
            return pair
        match = self.forms.index.match(data, position)
        if match is None or self._word(match[1], memo) != "fqn":
            return None
        place, ref = match.end(), match[2]
        if ref is not None:
            key = self._value(ref, memo)
        else:
            stop = place + match[3][0]
            key = str(data[place:stop], "utf-8", "surrogatepass")
            if not self.is_numbered or data[stop : stop + 1] != b"\x94":
                return None
            place = stop + 1
        rest = self.forms.index_rest.match(data, place)
        if rest is None or type(key) is not str:
            return None
        before, one, word, cls, text, plain, size, behind, other = rest.groups()
        for ref_of, value in ((before, one), (behind, other)):
            name = self._word(ref_of, memo)
            if name not in (None, "index") and (name != "offset" or value != b"N" or word):
                return None
        offsets: int | None = -1
        if word is not None:
            is_offset = self._word(word, memo) == "offset"
            offsets = self._shape(cls, text, plain, size, memo) if is_offset else None
        if offsets is None:
            return None
        if self.is_numbered:
            if key not in self._number_of:
                self._number_of[key] = len(self.names)
                self.names.append(key)
            self._index_numbers.append(len(memo) + self.skipped)
            self._index_keys.append(self._number_of[key])
            self._index_offsets.append(offsets)
        self._count(2)
        if ref is None:
            self._recalled.append(len(memo) + self.skipped)
            self._values.append(-1 - self._number_of[key])
            self._count(1)
        if word is not None:
            self._number(memo, offsets, cls, text, plain)
        return [IndexRow(key, offsets)], rest.end()

    def _info(self, data: Any, position: int, memo: dict[int, Any]) -> Any:
        match = self.forms.info.match(data, position)
        if match is None:
            return None
        path, file, offset, begin, length, count, more = match.groups()
        words = self._word(path, memo), self._word(offset, memo), self._word(length, memo)
        if words != ("relative_path", "offset", "length"):
            return None
        name = self._word(file, memo)
        is_known = more is None or self._word(more, memo) == "transform_descriptors"
        if type(name) is not str or not is_known:
            return None
        self._count(2)
        return [InfoRow(name, _integer(begin), _integer(count))], match.end()

    def _shape(
        self,
        cls: bytes | None,
        text: bytes,
        plain: bytes | None,
        ref: bytes,
        memo: dict[int, Any],
    ) -> int | None:
        """The index in `shapes` of a shape that a pickle writes in one of three ways.

        The shape may be a new torch.Size with the tuple `text`, a `plain` tuple, or a reference to
        a shape that was written before. None for a reference to any other value.
        """
        if plain is not None:
            known = self._known_shapes.get(b"t" + plain)
            if known is None:
                known = self._entered(b"t" + plain, _integers(plain))
            return known
        if cls is not None:
            function = self._word(cls, memo)
            is_size = type(function) is Global and function.name == "torch.Size"
            return self._number_of_shape(text) if is_size else None
        size = self._value(ref, memo)
        if type(size) not in (Size, tuple) or any(type(each) is not int for each in size):
            return None
        return self._entered(f"{type(size).__name__}{tuple(size)}".encode(), size)

    def _number_of_shape(self, text: bytes) -> int:
        known = self._known_shapes.get(text)
        if known is None:
            known = self._entered(text, Size(_integers(text)))
        return known

    def _number(
        self,
        memo: dict[int, Any],
        shape: int,
        cls: bytes | None,
        text: bytes | None,
        plain: bytes | None,
    ) -> None:
        """Counts the memo numbers of a shape that was just read; `recall` finds it by the last one.

        `shape` is the index in `shapes`; `cls`, `text` and `plain` are as in `_shape`.
        """
        if not self.is_numbered:
            return
        if plain is not None:
            if plain == b")":  # the empty tuple, which has no number
                return
        elif cls is None:  # a reference to an earlier shape
            return
        else:  # before a torch.Size: its tuple unless empty, and its arguments
            self.skipped += 2 if text != b")" else 1
        self._recalled.append(len(memo) + self.skipped)
        self._values.append(shape)
        self.skipped += 1

    def _entered(self, text: bytes, size: tuple[int, ...]) -> int:
        number = self._known_shapes.get(text)
        if number is None:
            if len(self._known_shapes) >= MOST_KNOWN:
                self._known_shapes.clear()
            number = self._known_shapes[text] = len(self.shapes)
            self.shapes.append(size)
        return number

    def _word(self, ref: bytes | None, memo: dict[int, Any]) -> Any:
        """The value of a reference that many objects of the pickle contain; looked up only once."""
        if ref is None:
            return None
        known = self._words.get(ref)
        if known is None:
            known = self._words[ref] = self._value(ref, memo)
        return known

    def _value(self, ref: bytes, memo: dict[int, Any]) -> Any:
        """Looks up the value of a reference by its memo number; raises as `recall`."""
        number = ref[1] if len(ref) == 2 else int.from_bytes(ref[1:], "little")
        return memo[number] if number in memo else self.recall(number)


def _place(numbers: array[int], number: int) -> int | None:
    """The index of a number in a sorted column; None if the column does not contain it."""
    place = bisect_left(numbers, number)
    return place if place < len(numbers) and numbers[place] == number else None


def _integers(text: bytes) -> tuple[int, ...]:
    """The integers of a pickled tuple."""
    return tuple(map(_integer, _INTEGERS.findall(text)))


def _integer(text: bytes) -> int:
    """The integer that a pickle instruction contains."""
    code = text[:1]
    if code in b"KM":
        return int.from_bytes(text[1:], "little")
    return int.from_bytes(text[1:] if code == b"J" else text[2:], "little", signed=True)


ROWS = frozenset({IndexRow, InfoRow})
"""The types that stand for keys and values of a dictionary; `Rows.set_items` stores them."""
