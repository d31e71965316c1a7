"""How a peer's tests end without zckpt and with it in the place of the peer's own code."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Results:
    """How every test of one run ended (passed, failed, skipped), and why it failed."""

    tests: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def ended(own: Results, ours: Results, without: str, with_zckpt: str) -> list[str]:
    """Tests that ended so without zckpt, and so with it; a test that is missing has failed."""
    return [
        name
        for name, end in own.tests.items()
        if end == without and ours.tests.get(name, "failed") == with_zckpt
    ]


def lost(own: Results, ours: Results) -> list[str]:
    """Tests that pass without zckpt alone."""
    return [*ended(own, ours, "passed", "failed"), *ended(own, ours, "passed", "skipped")]
