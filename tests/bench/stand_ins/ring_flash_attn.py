"""Stands in for ring-flash-attn, whose names, arguments and results ours are."""

from pyparallel.attention.ring_flash_attn import *  # noqa: F403
