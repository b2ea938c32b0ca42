"""The public door to attention; nothing outside this package imports the files behind it."""

from .api import attention
from .intervals import Intervals
from .parity import Deviation, Reference, deviations, make_qkv
from .spec import AttentionSpec
from .support import Support, markdown, support_table
from .tiles import Tile, Tiles, architecture, block_sizes, sram_elements, tiles
from .variants import NAMES, VARIANT_NAMES, Unsupported, choose, refusal, require, resolve, supporting

__all__ = [
    "NAMES",
    "VARIANT_NAMES",
    "AttentionSpec",
    "Deviation",
    "Intervals",
    "Reference",
    "Support",
    "Tile",
    "Tiles",
    "Unsupported",
    "architecture",
    "attention",
    "block_sizes",
    "choose",
    "deviations",
    "make_qkv",
    "markdown",
    "refusal",
    "require",
    "resolve",
    "sram_elements",
    "support_table",
    "supporting",
    "tiles",
]
