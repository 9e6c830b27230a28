# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Compiled core of kvmask. Binding only: argument checks, cdef classes, buffers, nogil calls."""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_READ,
    PyBUF_RECORDS_RO,
    PyBUF_SIMPLE,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_Check,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport Py_EQ, Py_NE, PyObject_RichCompareBool
from cpython.ref cimport Py_INCREF
from cpython.set cimport PySet_Contains
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

import numbers as _numbers
import operator as _operator
from collections.abc import Sequence as _Sequence
from functools import partial as _partial
from itertools import islice as _islice

from kvmask.errors import (
    AlignmentError,
    ArgumentError,
    BlockIdError,
    HashInputError,
    LayoutError,
    PlanStateError,
)

# Each file uses what stands in `_core.pxd`, above here, or in a file before it.
include "binding/integers.pxi"
include "binding/bitset.pxi"
include "binding/digests.pxi"
include "binding/keys.pxi"
include "binding/coordinator.pxi"
include "binding/layout.pxi"
include "binding/answers.pxi"
include "binding/lookup.pxi"
include "binding/blocks.pxi"
include "binding/plans.pxi"
include "binding/vllm.pxi"
include "binding/hints.pxi"
include "binding/ends.pxi"
include "binding/tokens.pxi"
include "binding/hashing.pxi"
include "binding/memory.pxi"
