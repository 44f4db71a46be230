"""Flash attention for Hopper, in Gluon: the copy engine, asynchronous products, and warps with one task each.

Chapter 03b. ``kvlab.flash`` calls it where it can run; ``refusal`` says where it cannot, and why.
"""

from kvlab.flash_hopper._launch import forward, refusal, tiling, unavailable
from kvlab.flash_hopper._plan import plan_tiles_kernel

__all__ = ["forward", "plan_tiles_kernel", "refusal", "tiling", "unavailable"]
