"""Under which names, and in which order, does a target get the parameters of a source?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import formats
from ..core.experts import layers_of
from ..core.manifest import Manifest
from ..formats.hf.options import MODEL_CONFIG
from ..naming import ties
from ..naming.families import translated
from ..naming.names import called_as, canonical, renamed
from ..naming.order import in_order_of
from ..training.options import FAMILY, PARAM_NAMES, RENAME, TIE, Options

if TYPE_CHECKING:
    from ..formats.format import Format


def named_for(format: Format, manifest: Manifest, options: Options) -> Manifest:
    """The source under the names that the target needs, in the order that the user gives."""
    origin = formats.family_of(str(manifest.source.get("format")))
    if options[RENAME]:
        manifest = renamed(manifest, options[RENAME])
    elif not format.is_neutral and format.family != origin:
        manifest = canonical(manifest)
    family, names = options[FAMILY], options[PARAM_NAMES]
    if family is not None:
        manifest = translated(manifest, family, options[MODEL_CONFIG])
    if names is not None and not _is_in_order(manifest):
        manifest = in_order_of(called_as(manifest, names), names)
    return ties.with_ties(manifest, options[TIE]) if options[TIE] else manifest


def _is_in_order(manifest: Manifest) -> bool:
    """Whether it was read in the order of --param-names, which do not name all of it.

    Model ranks have the names of their own; without ZeRO experts have those of one rank.
    """
    is_whole = manifest.source.get("zero_stage") == 0
    return "model_ranks" in manifest.source or (is_whole and bool(layers_of(manifest.engine)))
