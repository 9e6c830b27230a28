# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Compiled core of kvmask. Binding only: argument checks, cdef classes, buffers, nogil calls."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from kvmask.errors import (
    AlignmentError,
    ArgumentError,
    BlockIdError,
    HashInputError,
    LayoutError,
    PlanStateError,
    StoreError,
)

include "binding/integers.pxi"
include "binding/bitset.pxi"
include "binding/digests.pxi"
include "binding/keys.pxi"
include "binding/coordinator.pxi"
include "binding/lookup.pxi"
include "binding/vllm.pxi"
include "binding/hints.pxi"
include "binding/blocks.pxi"
include "binding/layout.pxi"
include "binding/hashing.pxi"
