"""The public door to attention; nothing outside this package imports the files behind it."""

from .api import attention
from .intervals import Intervals
from .spec import AttentionSpec
from .variants import NAMES, Unsupported, choose, refusal, require, resolve, supporting

__all__ = [
    "NAMES",
    "AttentionSpec",
    "Intervals",
    "Unsupported",
    "attention",
    "choose",
    "refusal",
    "require",
    "resolve",
    "supporting",
]
