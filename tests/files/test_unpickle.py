"""Pickles as plain data: every protocol, hostile ones, and nothing is ever imported."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.core.checkpoint.inert import ITSELF, Foreign, Global, Size, from_json, to_json
from zckpt.errors import CorruptCheckpoint
from zckpt.files.unpickle import Unpickler

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
PLAIN = (
    None,
    True,
    False,
    0,
    255,
    65535,
    -1,
    2**31,
    -(2**63),
    2**200,
    -(2**3000),
    0.1,
    -0.0,
    float("inf"),
    1 + 2j,
    "",
    "text",
    "é\u20ac\U0001f600",
    "lone \ud800 surrogate",
    "line\nbreak \\u0041 \r\0",
    "x" * 300,
    b"",
    b"\0\xff\n",
    b"b" * 300,
    bytearray(b""),
    bytearray(b"a\xffb"),
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, (2, [3, (4,)])),
    [],
    [1, [2, [3]]],
    {},
    {"a": {"b": {1: None, (2, "c"): [True]}}},
    {1: "int", 2.5: "float", None: "none", b"k": "bytes", frozenset({1}): "frozenset"},
    set(),
    {1, "two", (3,)},
    frozenset(),
    frozenset({1, frozenset({2})}),
    OrderedDict(),
    OrderedDict([("b", 1), ("a", [2])]),
    torch.Size([2, 3]),
)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float
    names: list[str]


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


class Attributes(dict):  # type: ignore[type-arg]
    pass


class Numbers(list):  # type: ignore[type-arg]
    pass


class Slotted:
    __slots__ = ("value",)


class Keyworded:
    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return (1,), {"word": 2}

    def __new__(cls, *_: int, **_words: int) -> Keyworded:
        return object.__new__(cls)


def slotted() -> Slotted:
    value = Slotted()
    value.value = 5
    return value


def load(data: bytes) -> Any:
    return Unpickler(data).load()


def same(left: Any, right: Any) -> bool:
    """Equal in type as well, signs of zeros and NaN included."""
    if isinstance(right, torch.Size):
        return type(left) is Size and tuple(left) == tuple(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        both_nan = left != left and right != right
        return both_nan or struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return bool(left == right)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_survive(value: Any, protocol: int) -> None:
    assert same(load(pickle.dumps(value, protocol)), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_survive_together(protocol: int) -> None:
    value = [PLAIN[:-1], dict(enumerate(PLAIN[:-1]))]
    assert same(load(pickle.dumps(value, protocol)), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sharing_survives(protocol: int) -> None:
    shared = ["one"]
    loaded = load(pickle.dumps({"a": shared, "b": shared}, protocol))
    assert loaded["a"] is loaded["b"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_list_that_holds_itself_is_refused(protocol: int) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CorruptCheckpoint, match="refers to itself"):
        load(pickle.dumps(value, protocol))


class Parent:
    """As OmegaConf's containers: each item knows its parent."""

    def __init__(self) -> None:
        self.content = {"child": Child(self), "others": [self]}


class Child:
    def __init__(self, parent: Parent) -> None:
        self.parent = parent


@pytest.mark.parametrize("protocol", PROTOCOLS[2:])
def test_an_object_that_refers_to_itself(protocol: int) -> None:
    """It is read; a mark stands for it where a value within it refers to it."""
    loaded = load(pickle.dumps(Parent(), protocol))
    content = loaded.state["content"]
    assert content["child"].state == {"parent": ITSELF}
    assert content["others"] == [ITSELF]


@pytest.mark.parametrize("name", ["bytearray", "bytes"])
def test_bytes_of_python_before_3_8_survive(name: str) -> None:
    text = b"c__builtin__\nbytearray\n(Vab\\u00ff\nX\x07\0\0\0latin-1t"
    if name == "bytes":
        text = b"c_codecs\nencode\n(Vab\\u00ff\nX\x06\0\0\0latin1t"
    assert load(b"\x80\x02" + text + b"R.") == b"ab\xff"


def test_text_of_python_2_is_text() -> None:
    assert load(b"S'a\\'b'\n.") == "a'b"
    assert load(b"U\x02ab.") == "ab"
    assert load(b"T\x02\0\0\0ab.") == "ab"
    assert load(b"(I01\nI00\nI7\nL8L\nL9\nt.") == (True, False, 7, 8, 9)


FOREIGN = (
    (Colour.RED, "Colour"),
    (Settings(0.1, ["a"]), "Settings"),
    (Point(1, 2), "Point"),
    (Attributes(a=1), "Attributes"),
    (Numbers([1, 2]), "Numbers"),
    (argparse.Namespace(lr=0.1), "argparse.Namespace"),
    (np.float32(1.5), "scalar"),
    (np.arange(3), "_reconstruct"),
    (np.dtype("float32"), "numpy.dtype"),
    (datetime.datetime(2024, 1, 2), "datetime.datetime"),
    (datetime.timedelta(3), "datetime.timedelta"),
    (functools.partial(int, base=2), "functools.partial"),
    (collections.defaultdict(list, {"a": [1]}), "collections.defaultdict"),
    (collections.Counter("aab"), "collections.Counter"),
    (collections.deque([1, 2]), "collections.deque"),
    (slice(1, 2), "builtins.slice"),
    (ValueError("no"), "ValueError"),
    (pathlib.PurePosixPath("/a/b"), "PurePosixPath"),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("value", "name"), FOREIGN, ids=[name for _, name in FOREIGN])
def test_other_objects_are_records(value: Any, name: str, protocol: int) -> None:
    loaded = load(pickle.dumps([value, "after"], protocol))
    assert loaded[1] == "after"
    assert isinstance(loaded[0], Foreign)
    rebuilders = ("copyreg._reconstructor", "numeric._frombuffer")
    if not loaded[0].name.endswith(rebuilders):
        assert loaded[0].name.endswith(name)
    again = to_json(from_json(json.loads(json.dumps(to_json(loaded), allow_nan=False))))
    assert again == to_json(loaded)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_records_have_the_attributes_of_objects(protocol: int) -> None:
    loaded = load(pickle.dumps(argparse.Namespace(lr=0.1, betas=(0.9, 0.95)), protocol))
    state = loaded.state[0] if isinstance(loaded.state, tuple) else loaded.state
    assert state == {"lr": 0.1, "betas": (0.9, 0.95)}


def test_contents_of_foreign_containers_are_kept() -> None:
    assert load(pickle.dumps(Attributes(a=1, b=2))).items == [("a", 1), ("b", 2)]
    assert load(pickle.dumps(Numbers([1, 2]))).appended == [1, 2]
    assert load(pickle.dumps(collections.defaultdict(list, a=1))).items == [("a", 1)]
    assert load(pickle.dumps(slotted(), 2)).state == (None, {"value": 5})


def test_objects_made_with_keywords_keep_them() -> None:
    loaded = load(pickle.dumps(Keyworded(), 4))
    assert (loaded.arguments, loaded.keywords, loaded.how) == ((1,), {"word": 2}, "new")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_classes_and_functions_are_names(protocol: int) -> None:
    loaded = load(pickle.dumps([dict, len, torch.float32, Settings], protocol))
    names = [item.name for item in loaded]
    assert all(type(item) is Global for item in loaded)
    assert names[:3] == ["builtins.dict", "builtins.len", "torch.float32"]
    assert names[3].endswith(".Settings")


def test_module_metadata_of_a_state_dict_is_kept() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    loaded = load(pickle.dumps(OrderedDict.fromkeys(state), 2))
    assert not hasattr(loaded, "_metadata")
    bare = OrderedDict(a=1)
    bare._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    assert load(pickle.dumps(bare, 2))._metadata == {"": {"version": 1}}


# -- nothing runs


class Bomb:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("call", [os.system, eval, exec], ids=lambda call: call.__name__)
def test_nothing_is_executed(tmp_path: Any, call: Any, protocol: int) -> None:
    witness = tmp_path / "ran"
    text = f"touch {witness}" if call is os.system else f"open({str(witness)!r}, 'w')"
    loaded = load(pickle.dumps({"a": Bomb(call, text)}, protocol))
    assert loaded["a"].arguments == (text,)
    assert not witness.exists()
    pickle.loads(pickle.dumps(Bomb(call, text), protocol))
    assert witness.exists(), "the bomb of this test is a dud"


HOSTILE = {
    "REDUCE": b"cwitness\nrun\n)R.",
    "NEWOBJ": b"\x80\x02cwitness\nRun\n)\x81.",
    "NEWOBJ_EX": b"\x80\x04cwitness\nRun\n)}\x92.",
    "INST": b"(iwitness\nrun\n.",
    "OBJ": b"(cwitness\nRun\no.",
    "BUILD": b"cwitness\nRun\n)\x81}X\x01\0\0\0xK\x01sb.",
    "STACK_GLOBAL": b"\x80\x04X\x07\0\0\0witnessX\x03\0\0\0run\x93)R.",
    "GLOBAL": b"cwitness\nrun\n.",
    "getattr": b"c__builtin__\ngetattr\n(cwitness\nRun\nX\x03\0\0\0runtR)R.",
    "reconstructor": b"ccopy_reg\n_reconstructor\n(cwitness\nRun\nc__builtin__\nobject\nNtR.",
    "import": b"c__builtin__\n__import__\n(X\x07\0\0\0witnesstR.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    witness = tmp_path / "witness.py"
    witness.write_text("def run(*_): ...\nclass Run:\n    def run(*_): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load(HOSTILE[name])
    assert isinstance(loaded, (Foreign, Global))
    assert "witness" not in sys.modules
    pickle.loads(HOSTILE[name])
    assert sys.modules.pop("witness"), "the pickle of this test is a dud"


REFUSED = {
    "EXT1": b"\x82\x01.",
    "EXT2": b"\x83\x01\0.",
    "EXT4": b"\x84\x01\0\0\0.",
    "NEXT_BUFFER": b"\x97.",
    "READONLY_BUFFER": b"\x98.",
    "unknown opcode": b"\xff.",
    "PERSID": b"Pabc\n.",
    "BINPERSID": b"K\x01Q.",
    "BUILD on a class": b"cposix\nsystem\n}b.",
    "call of a number": b"K\x01)R.",
    "call with a list": b"cposix\nsystem\n]R.",
    "object of a number": b"K\x01)\x81.",
    "object with keywords that are no dictionary": b"cposix\nsystem\n)]\x92.",
    "OBJ without a class": b"(o.",
    "OBJ of a number": b"(K\x01o.",
    "STACK_GLOBAL of numbers": b"K\x01K\x02\x93.",
    "APPEND to a number": b"K\x01K\x02a.",
    "APPEND of a mark": b"](a.",
    "APPENDS to a tuple": b")(K\x01e.",
    "SETITEM of a list": b"]K\x01K\x02s.",
    "SETITEMS odd": b"}(K\x01u.",
    "DICT odd": b"(K\x01d.",
    "ADDITEMS to a list": b"](K\x01\x90.",
    "ADDITEMS to a dictionary": b"}((K\x01K\x02t\x90.",
    "a list as a key": b"}]K\x01s.",
    "a set of dictionaries": b"\x8f(}\x90.",
    "TUPLE2 of one": b"K\x01\x86.",
    "TUPLE without a mark": b"K\x01t.",
    "a mark in a tuple": b"(\x85.",
    "a mark as the value": b"(.",
    "no value": b".",
    "two values": b"K\x01K\x02.",
    "GET of nothing": b"h\x07.",
    "GET of text": b"gx\n.",
    "PUT of nothing": b"q\x01.",
    "MEMOIZE of nothing": b"\x94.",
    "DUP of nothing": b"2.",
    "POP of nothing": b"0.",
    "a number that is none": b"Iabc\n.",
    "a float that is none": b"Fabc\n.",
    "a string without an end": b"S'abc\n.",
    "a string that is an expression": b"S(1, 2)\n.",
    "a string that is a call": b"Sabc((\n.",
    "a string with an unknown escape": b"S'\\x'\n.",
    "text that is no UTF-8": b"X\x01\0\0\0\xff.",
    "an escape that is none": b"V\\u12\n.",
    "a name that is no UTF-8": b"c\xff\nx\n.",
    "bytes of a number": b"cbuiltins\nbytes\n(I1000000000000\ntR.",
    "bytearray of a number": b"cbuiltins\nbytearray\n(I1000000000000\ntR.",
    "bytes of large numbers": b"cbuiltins\nbytes\n((lp0\nI999\natR.",
    "a set of a number": b"cbuiltins\nset\n(K\x01tR.",
    "an ordered dictionary of numbers": b"ccollections\nOrderedDict\n((K\x01ltR.",
    "a size of a number": b"ctorch\nSize\n(K\x01tR.",
    "a complex of text": b"cbuiltins\ncomplex\n(Vx\ntR.",
    "a complex of a huge number": b"cbuiltins\ncomplex\n(\x8a\xff" + b"\x7f" * 255 + b"tR.",
    "text in another encoding": b"c_codecs\nencode\n(Vx\nVrot13\ntR.",
    "text that is not latin1": b"c_codecs\nencode\n(V\\u20ac\nVlatin1\ntR.",
    "too many arguments": b"cbuiltins\nset\n(((ttR.",
    "nothing": b"",
    "the start alone": b"\x80\x02",
}


# `BUILD on a class` and `ADDITEMS to a dictionary` must at least leave plain data behind
HARMLESS = {"BUILD on a class"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", sorted(REFUSED.keys() - HARMLESS))
def test_a_pickle_that_no_pickler_writes_is_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        load(REFUSED[name])


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_is_not_refused_is_plain(name: str) -> None:
    assert load(REFUSED[name]) == Global("posix.system")


def test_every_truncation_is_refused() -> None:
    for protocol in PROTOCOLS:
        whole = pickle.dumps([PLAIN, Settings(0.5, ["a"])], protocol)
        for length in range(len(whole)):
            with pytest.raises(CorruptCheckpoint):
                load(whole[:length])


# -- memory and time

LAUGHS = b"".join(b"](" + b"h%c" % (i - 1) * 10 + b"eq%c0" % i for i in range(1, 12))
KEYS = b"".join(b"(" + b"h%c" % (i - 1) * 250 + b"tq%c0" % i for i in range(1, 14))
TEXT = b"X\x00\x00\x08\x00" + b"x" * (1 << 19) + b"q\x000"
COPIES = TEXT + b"c_codecs\nencode\nq\x010"
BOMBS = {
    "a memo index of 2**32 - 1": b"\x80\x02]r\xff\xff\xff\xff0j\xff\xff\xff\xfej.",
    "GET of a huge index": b"Np9\n0g99999999999999999999\n.",
    "BINUNICODE8 of 2**62": b"\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "BINUNICODE8 of 2**64 - 1": b"\x8d" + b"\xff" * 8 + b"x.",
    "BINBYTES8 of 2**62": b"\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "BYTEARRAY8 of 2**40": b"\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "BINBYTES of 2**32 - 1": b"B\xff\xff\xff\xffx.",
    "LONG4 of 2**31": b"\x8b\xff\xff\xff\x7fx.",
    "bytes(10**12)": REFUSED["bytes of a number"],
    "bytearray(10**12)": REFUSED["bytearray of a number"],
    "bytes(10**12) by NEWOBJ": b"cbuiltins\nbytes\nI1000000000000\n\x85\x81.",
    "a tuple in a tuple, 100,000 times, as a key": b"}N" + b"\x85" * 100_000 + b"Ns.",
    "a tuple in a tuple, 100,000 times, in a set": b"\x8f(N" + b"\x85" * 100_000 + b"\x90.",
    "the same in frozenset": b"(N" + b"\x85" * 100_000 + b"\x91.",
    "two deep frozensets as keys": b"}"
    + 2 * (b"(" * 50_000 + b"N" + b"\x91" * 50_000 + b"Ns")
    + b".",
    "a tuple of tuples that multiply, as a key": b"}Nq\x000" + KEYS + b"h\x0dNs.",
    "the same in a set": b"Nq\x000" + KEYS + b"\x8f(h\x0d\x90.",
    "the same in an ordered dictionary": b"Nq\x000"
    + KEYS
    + b"ccollections\nOrderedDict\n(](h\x0dN\x86etR.",
    "a large text encoded again and again": COPIES + b"](" + b"h\x01h\0\x85R" * 20_000 + b"e.",
    "a large list made a set again and again": b"]("
    + b"".join(b"J" + struct.pack("<i", i) for i in range(100_000))
    + b"eq\x000cbuiltins\nset\nq\x010]("
    + b"h\x01h\0\x85R" * 5_000
    + b"e.",
    "a string of nested brackets": b"S" + b"(" * 100_000 + b"\n.",
    "a long integer as text": b"I" + b"9" * 1_000_000 + b"\n.",
}
THROUGH_JSON = {
    "a list in a list, 100,000 times": b"]" * 100_000 + b"a" * 99_999 + b".",
    "a tuple in a tuple, 100,000 times": b"N" + b"\x85" * 100_000 + b".",
    "an object in an object, 5,000 times": b"N" + b"q\x000cm\nf\nh\0\x85R" * 5_000 + b".",
    "a large text again and again": TEXT + b"](" + b"h\0" * 9_999 + b"e.",
    "a large key again and again": TEXT + b"}h\0Nsq\x010](" + b"h\1" * 9_999 + b"e.",
    "large bytes again and again": b"B" + TEXT[1:] + b"](" + b"h\0" * 9_999 + b"e.",
    "a billion laughs": b"Nq\x000" + LAUGHS + b"h\x0b.",
    "a billion laughs in a set of objects": b"Nq\x000" + LAUGHS + b"\x8f(cm\nf\n)Rh\x0bb\x90.",
    "a deep object in a set": b"\x8f(cm\nf\n)R" + b"]" * 100_000 + b"a" * 99_999 + b"b\x90.",
    "a list that holds itself": b"]q\x00h\0a.",
    "an object that holds itself": b"cm\nf\n)Rq\x00h\0b.",
}
LIMITED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
from zckpt.errors import CorruptCheckpoint
from zckpt.core.checkpoint.inert import to_json
from zckpt.files.unpickle import Unpickler
try:
    value = Unpickler(sys.stdin.buffer.read()).load()
    if sys.argv[1] == "json":
        json.dumps(to_json(value))
except CorruptCheckpoint:
    print("refused")
"""


def outcome(data: bytes, then: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, then], input=data, capture_output=True, timeout=60
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-400:].decode()}"
    return done.stdout.decode().strip()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_within_a_gigabyte(name: str) -> None:
    assert outcome(BOMBS[name], "") == "refused"


@pytest.mark.parametrize("name", THROUGH_JSON)
def test_a_value_that_explodes_later_is_refused_by_json(name: str) -> None:
    assert outcome(THROUGH_JSON[name], "json") == "refused"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    ],
    ids=["BINPUT", "FRAME"],
)
def test_a_huge_number_that_is_no_size_costs_no_memory(data: bytes) -> None:
    assert outcome(data, "json") == ""


# -- random ones

keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers())
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(allow_nan=False),
        st.text(st.characters(exclude_categories=())),
        st.binary(),
        st.binary().map(bytearray),
        st.frozensets(keys, max_size=3),
        st.sets(keys, max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(values, st.sampled_from(PROTOCOLS))
def test_random_structures_survive(value: Any, protocol: int) -> None:
    assert same(load(pickle.dumps(value, protocol)), value)


def refused_or_plain(data: bytes) -> None:
    text = "null"
    with suppress(CorruptCheckpoint):
        value = load(data)
        try:
            text = json.dumps(to_json(value), allow_nan=False)
        except CorruptCheckpoint as error:
            if "type" in error.message:  # neither plain nor a record, not just too deep
                pytest.fail(error.message)
    assert to_json(from_json(json.loads(text))) == json.loads(text)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_plain(data: bytes) -> None:
    refused_or_plain(data)


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(b"()]}NtlduasbRQc\x81\x92oiqhK.02\x85\x86\x8f\x90\x91\x93X"), max_size=60
    )
)
def test_random_opcodes_are_refused_or_plain(codes: list[int]) -> None:
    refused_or_plain(bytes(codes) + b".")


@settings(max_examples=200)
@given(st.data())
def test_mutations_are_refused_or_plain(data: st.DataObject) -> None:
    protocol = data.draw(st.sampled_from(PROTOCOLS))
    rich = [PLAIN[:20], Colour.RED, Settings(0.5, ["a"]), np.float32(1), {"k": {1, 2}}]
    text = bytearray(pickle.dumps(rich, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.integers(0, 255))
    refused_or_plain(bytes(text))
