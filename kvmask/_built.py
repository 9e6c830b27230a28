"""Says what to do when the compiled core is missing, as in a clone that is not built."""

from pathlib import Path

try:
    import kvmask._core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "kvmask._core":
        raise
    folder = Path(__file__).parent.parent
    raise ImportError(
        f"kvmask must be built for this Python, got no compiled core in {folder}: run "
        "`python setup.py build_ext --inplace` there; or, if kvmask is installed, start Python in "
        "another folder, because this one comes before it",
        name="kvmask._core",
    ) from None
