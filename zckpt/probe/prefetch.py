"""Reads the weights of the next modules on a thread, while the current module computes.

    computes    A   B   C   D        the program's thread
    reads       B   C   D   A        the reading thread, and the program's thread if it must wait

The next modules are guessed. A wrong guess costs an unnecessary read, but never causes a wrong
value. The memory of released modules is reused, and has huge pages if the system allows them. A
read into new pages of 4 KiB takes three times as long as one into new huge pages (1.6 and
5.5 GB/s), and five times as long as one into used pages.
"""

from __future__ import annotations

import mmap
import re
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ..core.storage.fileio import in_pages, memory_of

THREAD = "zckpt-stream"
LITTLE = 1 << 20  # bytes; reading fewer takes less time than waking up a thread
AHEAD = 32 << 20  # bytes; more would be evicted from the processor's cache before their use


class Order:
    """Guesses which module is called next, from earlier calls.

    `paths` maps the ids of modules to their paths, in the order of registration.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._modules = list(paths)
        self._places = {module: place for place, module in enumerate(paths)}
        # `layers.0.fc1` and `layers.1.fc1` are of the same kind
        self._kinds = [re.sub(r"\d+", "*", path, count=1) for path in paths.values()]
        self._next: dict[tuple[int, ...], int] = {}
        self._steps: dict[str, int] = {}  # by kind: the distance to the next called module
        self._last: tuple[int, ...] = ()

    def called(self, module: int) -> None:
        """Registers that a module is called now."""
        if self._last:
            before = self._places[self._last[-1]]
            self._steps[self._kinds[before]] = self._places[module] - before
            self._next[self._last] = self._next[self._last[-1:]] = module
        self._last = (*self._last[-1:], module)

    def following(self, guessed: Collection[int]) -> Iterator[int]:
        """Yields the modules that will probably be called next, after those in `guessed`.

        It ends before a module that it has already yielded, or that is in `guessed`.
        """
        last, seen = (*self._last, *guessed)[-2:], set(guessed)
        while (module := self._after(last)) is not None and module not in seen:
            seen.add(module)
            yield module
            last = (*last[-1:], module)

    def _after(self, last: tuple[int, ...]) -> int | None:
        for calls in (last, last[-1:]):  # a module that is called twice has two successors
            if calls in self._next:
                return self._next[calls]
        # not called before: its layer calls modules as earlier layers do, or as they are registered
        place = self._places[last[-1]]
        place += self._steps.get(self._kinds[place], 1)
        return self._modules[place] if 0 <= place < len(self._modules) else None


class Memory(Struct, eq=False):
    """A pool of memory for the weights of modules, of at most `most` bytes in total.

    `take` returns views. Their memory becomes free when a view and all tensors made from it are
    deleted. Only one thread at a time may call `take`.
    """

    _most: int
    _size: int = 0
    _free: list[mmap.mmap] = field(default_factory=list)  # by size
    _returned: deque[mmap.mmap] = field(default_factory=deque)  # any thread may append

    def take(self, size: int) -> memoryview:
        """Returns `size` page-aligned bytes with arbitrary contents.

        They count towards the pool's limit as whole pages.
        """
        while self._returned:
            insort(self._free, self._returned.popleft(), key=len)
        most = LITTLE if size < LITTLE else self._most  # large memory is for large modules
        place = bisect_left(self._free, size, key=len)
        if place < len(self._free) and len(self._free[place]) <= most:
            memory = self._free.pop(place)
        else:
            while self._free and self._size + size > self._most:
                self._size -= len(self._free.pop(0))
            memory = memory_of(size)
            self._size += len(memory)
        view = memoryview(memory)[:size]
        weakref.finalize(view, self._returned.append, memory)
        return view


class WeightPart(Struct, frozen=True, eq=False):
    """Weights of a module that are read together into one range of `size` bytes.

    `pieces` are parts of the range, which several threads read. `make` turns the bytes into tensors
    for the module. If `stays` is True, these weights stay loaded until the end, because several
    modules need them.
    """

    size: int
    pieces: Sequence[Any]
    make: Callable[[memoryview], Any]
    stays: bool = False

    @property
    def cost(self) -> int:
        """The bytes of memory that these weights occupy: `size`, rounded up to full pages."""
        return in_pages(self.size)


class _Load(Struct, eq=False):
    """Weights of a module (`part`) that are being read or were read, and their memory.

    Memory is allocated when the reading of the first piece begins.
    """

    part: WeightPart
    waiting: list[Any]  # pieces that no thread has begun, the first one last
    view: memoryview | None = None
    active: int = 0  # pieces that are being read
    done: bool = False
    value: Any = None
    error: BaseException | None = None


Read = Callable[[Any, memoryview, bool], None]
"""A function that reads a piece of a `WeightPart` from files into the memory of this part.

Its arguments: the piece, the memory, and whether the prefetcher's own thread calls it.
"""


class Prefetcher:
    """Reads the weights of modules on a thread, before the modules are called.

    `parts` maps a module's id to the parts of its weights, and `paths` to its path, both in the
    order of registration. Loaded weights need at most the memory of the two largest modules plus
    `LITTLE`. The own weights of modules that contain the called module need memory in addition.
    """

    def __init__(
        self, parts: Mapping[int, Sequence[WeightPart]], paths: Mapping[int, str], read_part: Read
    ) -> None:
        self._parts = parts
        self._read = read_part
        self._order = Order(paths)
        self._most = most(sum(part.cost for part in each) for each in parts.values())
        staying = {part for each in parts.values() for part in each if part.stays}
        moving = most(sum(part.cost for part in each if not part.stays) for each in parts.values())
        room = self._most - sum(part.cost for part in staying)
        self._room = min(room, max(moving, AHEAD))  # bytes for what does not stay
        self._memory = Memory(self._most)
        self._guessed: dict[int, None] = {}  # modules, in the order of the guessed calls
        self._loads: dict[WeightPart, _Load] = {}  # parts that are read ahead or stay
        self._spare: dict[WeightPart, None] = {}  # parts read ahead for calls that did not come
        self._ahead = 0  # bytes of memory for loads that do not stay
        self._needed: list[_Load] = []  # by the call that waits
        self._errors: dict[WeightPart, BaseException] = {}
        self._raised: set[WeightPart] = set()  # by a call
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def take(self, module: int) -> list[Any]:
        """The tensors of a module that is called now: one result of `make` for each `WeightPart`.

        A part that was not read ahead is read now. Meanwhile the thread reads for later calls.
        Raises an error that occurred when weights of this module were read.
        """
        self._order.called(module)
        with self._changed:
            loads = self._needed = [self._taken(part) for part in self._parts[module]]
            self._guess(module)
        with self._calling:  # `read` may have one buffer for all threads of the program
            for load in loads:
                self._complete(load)
        self._needed = []
        if errors := [self._forget(load) for load in loads if load.error is not None]:
            raise errors[0]
        return [load.value for load in loads]

    def finish(self) -> None:
        """Ends the thread, and raises the first reading error that `take` has not raised.

        Weights that were read ahead for a call that did not come can have such an error.
        """
        self.close()
        for part, error in self._errors.items():
            if part not in self._raised:
                raise error

    def close(self) -> None:
        """Ends the thread after the piece that it is reading."""
        with self._changed:
            self._closed = True
            self._loads.clear()
            self._changed.notify_all()
        self._thread.join()

    def _taken(self, part: WeightPart) -> _Load:
        load = self._loads.get(part) or self._begin(part)
        if not part.stays:
            self._drop(part)
        return load

    def _begin(self, part: WeightPart) -> _Load:
        self._loads[part] = load = _Load(part, list(reversed(part.pieces)))
        self._changed.notify_all()
        if not part.stays:
            self._ahead += part.cost
        return load

    def _drop(self, part: WeightPart) -> None:
        del self._loads[part]
        self._spare.pop(part, None)
        self._ahead -= part.cost

    def _guess(self, module: int) -> None:
        if next(iter(self._guessed), None) == module:
            del self._guessed[module]
        else:
            self._start_again()
        bytes_needed = sum(part.cost for part in self._parts[module] if not part.stays)
        self._make_room(bytes_needed, ())
        for following in self._order.following(self._guessed):
            parts = self._parts[following]
            missing = [part for part in parts if part not in self._loads]
            more = bytes_needed + sum(part.cost for part in missing if not part.stays)
            self._make_room(more, parts)
            if self._ahead + more > self._room:
                return
            self._guessed[following] = None
            for part in parts:
                self._spare.pop(part, None)
            for part in missing:
                self._begin(part)

    def _make_room(self, size: int, needed: Sequence[WeightPart]) -> None:
        """Frees memory for `size` bytes by dropping weights, if there is not enough.

        It drops only weights that are not `needed`, and that were read ahead for calls that did not
        come.
        """
        for part in [part for part in self._spare if part not in needed]:
            if self._ahead + size > self._room:
                self._drop(part)

    def _start_again(self) -> None:
        """Discards all guesses after a wrong one.

        Weights whose reading has begun are kept until memory is short.
        """
        self._guessed.clear()
        for part, load in list(self._loads.items()):
            if not part.stays:
                self._spare[part] = None
                if load.view is None:
                    self._drop(part)

    def _run(self) -> None:
        while (claimed := self._next()) is not None:
            self._read_piece(*claimed, ahead=True)
            del claimed  # it would keep the memory while this thread waits

    def _next(self) -> tuple[_Load, Any] | None:
        with self._changed:
            while not self._closed:
                load = next((load for load in self._loads_by_urgency() if load.waiting), None)
                if load is not None:
                    return load, self._claim(load)
                self._changed.wait()
            return None

    def _loads_by_urgency(self) -> Iterator[_Load]:
        """Yields the weights to read: first those that the current call waits for."""
        yield from self._needed
        yield from self._loads.values()

    def _claim(self, load: _Load) -> Any:
        if load.view is None:
            load.view = self._memory.take(load.part.size)
        load.active += 1
        return load.waiting.pop()

    def _complete(self, load: _Load) -> None:
        """Reads the pieces that the thread has not begun, and waits for those it is reading."""
        while True:
            with self._changed:
                if not load.waiting:
                    self._changed.wait_for(lambda: load.done)
                    return
                piece = self._claim(load)
            self._read_piece(load, piece, ahead=False)

    def _read_piece(self, load: _Load, piece: Any, ahead: bool) -> None:
        assert load.view is not None
        try:
            self._read(piece, load.view, ahead)
        except BaseException as error:
            self._fail(load, error)
        with self._changed:
            load.active -= 1
            if load.active or load.waiting:
                return
        try:
            if load.error is None:
                load.value = load.part.make(load.view)
        except BaseException as error:
            self._fail(load, error)
        with self._changed:
            load.done = True
            self._changed.notify_all()

    def _fail(self, load: _Load, error: BaseException) -> None:
        with self._changed:
            load.error = self._errors[load.part] = error
            load.waiting.clear()

    def _forget(self, load: _Load) -> BaseException:
        """Removes weights whose reading failed, so that the next call reads them again.

        Returns the error.
        """
        assert load.error is not None
        with self._changed:
            self._raised.add(load.part)
            if self._loads.get(load.part) is load:
                del self._loads[load.part]
        return load.error


def most(costs: Iterable[int]) -> int:
    """The most bytes that streaming keeps in memory: the two largest of `costs`, and 1 MiB.

    `costs` are the bytes of each module's weights.
    """
    return sum(sorted(costs)[-2:]) + LITTLE
