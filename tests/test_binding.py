"""The binding's text: one contract in `_core.pxd`, and files that use only what stands before them.

Cython itself does not mind the order. A reader who goes from file to file does.
"""

import re
from pathlib import Path

import pytest

import kvmask

PACKAGE = Path(kvmask.__file__).parent
PYX = PACKAGE / "_core.pyx"
PXD = PACKAGE / "_core.pxd"
if not PYX.exists():
    pytest.skip("the sources of the core are not beside it", allow_module_level=True)

INCLUDED = re.findall(r'^include "binding/(\w+)\.pxi"$', PYX.read_text(encoding="utf-8"), re.M)
FILES = {name: PACKAGE / "binding" / f"{name}.pxi" for name in INCLUDED}


def code(path):
    """The text without comments and without what stands in strings, but for f-strings' values."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'""".*?"""', '""', text, flags=re.DOTALL)

    def values(match):
        inner = "" if match[1] != "f" else " ".join(re.findall(r"\{([^{}]*)\}", match[3]))
        return f'"" {inner} '

    text = re.sub(r"""(\b[fbr]|)(["'])((?:\\.|(?!\2)[^\\\n])*)\2""", values, text)
    return re.sub(r"#[^\n]*", "", text)


def defined(text):
    """Names that a file defines at its top level."""
    names = set(re.findall(r"^(?:cdef )?class (\w+)", text, re.M))
    # The last name before a bracket or an equals sign is what is defined.
    names |= set(
        re.findall(
            r"^(?:def|cpdef|cdef)\b(?! class| extern| enum)[^(=\n]*?(\w+)(?:\[\w+\])?\(", text, re.M
        )
    )
    names |= set(re.findall(r"^(?:cdef [^(=\n]*?)?(\w+)(?:\[\w+\])? =", text, re.M))
    for block in re.findall(r"^cdef enum:\n((?:    .*\n)+)", text, re.M):
        names |= set(re.findall(r"^    (\w+)", block, re.M))
    return names


CODE = {name: code(path) for name, path in FILES.items()}
DEFINED = {name: defined(text) for name, text in CODE.items()}


def test_every_file_is_included_once():
    assert sorted(INCLUDED) == sorted(p.stem for p in (PACKAGE / "binding").glob("*.pxi"))


def test_the_names_are_found():
    """The test below is worth nothing when it sees no names."""
    assert {"check_integer", "as_int64"} <= DEFINED["integers"]
    assert {"Bitset", "MAX_BITS", "c_max_bits", "new_bitset", "no_words"} <= DEFINED["bitset"]
    assert {"KeyBuilder", "build_keys", "PIN_STRIDE", "pinned_keys"} <= DEFINED["keys"]
    assert min(len(names) for names in DEFINED.values()) > 0


@pytest.mark.parametrize("name", INCLUDED)
def test_a_file_uses_what_stands_before_it(name):
    promised = set(re.findall(r"^cdef class (\w+)", code(PXD), re.M))
    later = set()
    for other in INCLUDED[INCLUDED.index(name) + 1 :]:
        later |= DEFINED[other]
    # Attributes and keyword arguments are other names.
    used = set(re.findall(r"(?<![.\w])(\w+)\b(?!\s*=[^=])", CODE[name]))
    own = DEFINED[name] | promised
    assert used & (later - own) == set()


@pytest.mark.parametrize("name", INCLUDED)
def test_declarations_stand_in_the_contract(name):
    text = CODE[name]
    assert "cdef extern" not in text
    assert "cimport" not in text
    assert re.findall(r"^(?:import|from) ", text, re.M) == []
    # A class's C attributes and methods are declared in the `.pxd`; here are their bodies.
    for cls, body in re.findall(r"^cdef class (\w+).*\n((?:    .*\n|\n)+)", text, re.M):
        assert re.findall(r"^    cdef [^(\n]*$", body, re.M) == [], cls


def test_nothing_is_imported_twice():
    text = "\n".join(code(path) for path in (PXD, PYX))
    found = []
    for lines in re.findall(r"^from [\w.]+ c?import (\([^)]*\)|[^\n]*)", text, re.M):
        found += re.findall(r"\w+(?=\s*(?:,|\)|$))", lines)
    assert len(found) > 20
    assert sorted(found) == sorted(set(found))


def comprehensions(text):
    """Lines with a `for` that is not the first word of a statement: comprehensions, generators.

    Cython 3.3.1 frees the item of a list comprehension twice when there is no memory to append it.
    """
    return re.findall(r"^(?=.*\bfor\b)(?!\s*for\b).*$", text, re.M)


def test_comprehensions_are_found():
    text = "for i in x:\n    a = [i for i in x]\n    return all(\n        y for y in z\n    )\n"
    assert comprehensions(text) == ["    a = [i for i in x]", "        y for y in z"]


@pytest.mark.parametrize("name", INCLUDED)
def test_no_file_has_a_comprehension(name):
    assert comprehensions(CODE[name]) == []
