"""Names for annotations, in modules that `zckpt inspect` imports.

`typing` takes a third of the time in which Python itself starts. Type checkers take these names for
those of `typing`. At run time nothing evaluates annotations, so that any value will do.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know it by its name, and take it for True

if TYPE_CHECKING:
    from typing import Any as Any
    from typing import BinaryIO as BinaryIO
    from typing import NoReturn as NoReturn
else:
    Any = BinaryIO = NoReturn = object
