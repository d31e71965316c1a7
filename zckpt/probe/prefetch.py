"""Which modules' weights are read next, and into which memory?

    computes    A   B   C   D        the program's thread
    reads       B   C   D   A        one thread of the block

A large module computes long enough to hide the next read, a small one does not. So modules are read
ahead until they have LITTLE bytes. A wrong guess costs a read that nobody needs, and never gives a
wrong value. Memory of released modules is used again: a read into new pages of memory takes two to
three times as long.
"""

from __future__ import annotations

import mmap
import re
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

THREAD = "zckpt-stream"
LITTLE = 1 << 20  # bytes; fewer are read in less time than a thread may take to wake up


class Order:
    """Guesses the next modules, which have these `paths`, in the order of registration.

    Known is what followed the last two modules before: a module that is called twice has two
    successors. Otherwise a block is expected to call its modules as the block before it did, and
    before that in the order of registration.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._modules = list(paths)
        self._places = {module: place for place, module in enumerate(paths)}
        # the same for `layers.0.fc1` and `layers.1.fc1`
        self._kinds = [re.sub(r"\d+", "*", path, count=1) for path in paths.values()]
        self._next: dict[tuple[int, ...], int] = {}
        self._steps: dict[str, int] = {}  # from a module of a kind to the next one
        self._last: tuple[int, ...] = ()

    def called(self, module: int) -> None:
        """Learns a call."""
        if self._last:
            before = self._places[self._last[-1]]
            self._steps[self._kinds[before]] = self._places[module] - before
            self._next[self._last] = self._next[self._last[-1:]] = module
        self._last = (*self._last[-1:], module)

    def following(self) -> Iterator[int]:
        """The modules that are probably called next, each of them once."""
        last, seen = self._last, set[int]()
        while (module := self._after(last)) is not None and module not in seen:
            seen.add(module)
            yield module
            last = (*last[-1:], module)

    def _after(self, last: tuple[int, ...]) -> int | None:
        for known in (last, last[-1:]):
            if known in self._next:
                return self._next[known]
        place = self._places[last[-1]]
        place += self._steps.get(self._kinds[place], 1)
        return self._modules[place] if 0 <= place < len(self._modules) else None


class Memory:
    """Memory for modules. Free memory is kept only if used and free memory are below `most` bytes.

    The memory of a view becomes free when neither the view nor a tensor made from it is alive. Only
    one thread may call `take`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._free: list[mmap.mmap] = []  # by size
        self._returned: deque[mmap.mmap] = deque()  # any thread may append

    def take(self, size: int) -> memoryview:
        """`size` bytes, page-aligned, with any contents."""
        while self._returned:
            insort(self._free, self._returned.popleft(), key=len)
        most = LITTLE if size < LITTLE else self._most  # large memory is for large modules
        place = bisect_left(self._free, size, key=len)
        if place < len(self._free) and len(self._free[place]) <= most:
            memory = self._free.pop(place)
        else:
            while self._free and self._size + size > self._most:
                self._size -= len(self._free.pop(0))
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._size += len(memory)
        view = memoryview(memory)[:size]
        weakref.finalize(view, self._returned.append, memory)
        return view


class Prefetcher:
    """Reads the bytes of modules on a thread, ahead of the calls.

    `sizes` (bytes) and `paths` have the modules in the order of registration. `read` fills a view
    with the bytes of a module. Beside the modules that are being called, at most one module and
    LITTLE bytes are in memory.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        paths: Mapping[int, str],
        read: Callable[[int, memoryview], None],
    ) -> None:
        self._sizes = sizes
        self._read = read
        self._order = Order(paths)
        self._memory = Memory(sum(sorted(sizes.values())[-2:]) + LITTLE)
        self._thread = ThreadPoolExecutor(1, THREAD)
        self._ahead: dict[int, Future[memoryview]] = {}  # in the order of the guessed calls
        self._errors: list[BaseException] = []  # of reads that no forward needed

    def take(self, module: int) -> memoryview:
        """The bytes of a module that is called now; reads of those after it go on meanwhile.

        Raises what `read` raised for this module.
        """
        self._order.called(module)
        while self._ahead and next(iter(self._ahead)) != module:
            self._drop()
        if not self._ahead:
            self._submit(module)
        future = self._ahead.pop(module)
        for following in self._order.following():
            if sum(self._sizes[each] for each in self._ahead) >= LITTLE:
                break
            if following not in self._ahead:
                self._submit(following)
        return future.result()

    def finish(self) -> None:
        """Ends the thread; raises the error of a read that no forward needed."""
        self.close()
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """Ends the thread, after the read that it has begun."""
        while self._ahead:
            self._drop()
        self._thread.shutdown()

    def _submit(self, module: int) -> None:
        self._ahead[module] = self._thread.submit(self._fill, module)

    def _fill(self, module: int) -> memoryview:
        view = self._memory.take(self._sizes[module])
        self._read(module, view)
        return view

    def _drop(self) -> None:
        """Gives up the first guess."""
        future = self._ahead.pop(next(iter(self._ahead)))
        if not future.cancel():
            future.add_done_callback(self._keep_error)

    def _keep_error(self, future: Future[memoryview]) -> None:
        if error := future.exception():
            self._errors.append(error)
