"""Build of the one extension, `kvmask._core`.

Environment knobs:
    KVMASK_DEBUG=1      no optimisation, debug symbols, C asserts on
    KVMASK_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer, debug symbols, C asserts on
    KVMASK_WERROR=1     compiler warnings are errors
"""

import os
import re
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup


def flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


HERE = Path(__file__).parent


def readme() -> str:
    """The README as an index shows it: without the links and pictures of the repository."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    inside = r"\[([^]]*)\]\((?!https?://|#)[^)\s]+\)"
    return re.sub(inside, r"\1", re.sub("!" + inside, "", text))


compile_args = ["-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-function"]
# Cython's own output is not warning-clean at -Wextra.
compile_args += ["-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-sign-compare"]
link_args: list[str] = []
if flag("KVMASK_DEBUG") or flag("KVMASK_SANITIZE"):
    # Sanitizers slow a build that is not optimised at all too much.
    compile_args += ["-O0" if flag("KVMASK_DEBUG") else "-O1", "-g", "-UNDEBUG"]
else:
    # Python's own flags ask for debug symbols, which are five sixths of the file.
    compile_args += ["-O3", "-g0"]
    link_args += ["-Wl,--strip-all"]
if flag("KVMASK_SANITIZE"):
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compile_args += [*sanitize, "-fno-omit-frame-pointer"]
    link_args += sanitize
if flag("KVMASK_WERROR"):
    compile_args += ["-Werror"]

# Cython sees only the .pyx; an edit of a header or of an included file must rebuild too.
depends = [
    *(str(p.relative_to(HERE)) for p in (HERE / "kvmask" / "csrc").glob("*.h")),
    *(str(p.relative_to(HERE)) for p in (HERE / "kvmask" / "binding").glob("*.pxi")),
    "kvmask/_core.pxd",
]

core = Extension(
    "kvmask._core",
    ["kvmask/_core.pyx"],
    include_dirs=["kvmask/csrc"],
    depends=depends,
    extra_compile_args=compile_args,
    extra_link_args=link_args,
    libraries=["dl"],
)

setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=cythonize(
        [core],
        compiler_directives={"language_level": "3", "embedsignature": True},
        force=flag("KVMASK_DEBUG") or flag("KVMASK_SANITIZE"),
    ),
)
