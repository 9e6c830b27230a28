"""Build the documentation as HTML into build/docs: the pages, and the API reference.

The reference is made from the docstrings of what `REFERENCE` lists, which is every public name. The
pages in docs/ stay as they are: they are copied, and links to sources, which the HTML does not
have, become plain text. A warning is an error.
"""

import enum
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
BUILD = ROOT / "build" / "docs"
TIMEOUT = 300  # seconds

#: Page of the reference to what it lists, each by the path that users import it by.
REFERENCE = {
    "Contracts and requests": (
        "kvmask.Contract",
        "kvmask.BoundContract",
        "kvmask.CacheRequest",
        "kvmask.Hashing",
        "kvmask.RankGrid",
        "kvmask.PayloadFacts",
        "kvmask.payload.TensorFacts",
        "kvmask.contract.compare.Difference",
    ),
    "Groups, masks and hits": (
        "kvmask.groups.Group",
        "kvmask.FullAttention",
        "kvmask.SlidingWindow",
        "kvmask.ChunkedLocal",
        "kvmask.Mamba",
        "kvmask.Coordinator",
        "kvmask.Hit",
        "kvmask.Bitset",
    ),
    "Transfers": (
        "kvmask.KVTransfer",
        "kvmask.SaveResult",
        "kvmask.LoadResult",
        "kvmask.BlockFailure",
        "kvmask.PresenceMemo",
        "kvmask.AbsenceMemo",
        "kvmask.HitHints",
        "kvmask.Breaker",
        "kvmask.plans.Renewals",
        "kvmask.CostModel",
        "kvmask.plans.metrics.TransferStats",
        "kvmask.plans.metrics.StatsCollector",
        "kvmask.plans.metrics.exposition",
    ),
    "Plans": (
        "kvmask.LookupPlan",
        "kvmask.SavePlan",
        "kvmask.LoadPlan",
        "kvmask.drive",
        "kvmask.Call",
        "kvmask.plans.Plan",
        "kvmask.Store",
        "kvmask.PlanTools",
        "kvmask.StorePolicy",
        "kvmask.plans.Handoff",
        "kvmask.plans.Held",
        "kvmask.plans.Scheme",
        "kvmask.plans.GroupScheme",
        "kvmask.plans.Addresses",
        "kvmask.plans.Guard",
    ),
    "Memory": ("kvmask.KVLayout", "kvmask.layout.head_shards", "kvmask.BounceMemory"),
    "Hashes": (
        "kvmask.hash_tokens",
        "kvmask.BlockHasher",
        "kvmask.BlockHashes",
        "kvmask.hashing.DigestOrigin",
        "kvmask.hashing.digest_size",
        "kvmask.hashing.start_hash",
        "kvmask.hashing.chain_hashes",
        "kvmask.hashing.extra_keys.block_extra_keys",
        "kvmask.hashing.lmcache_chunk_hashes",
        "kvmask.hashing.sglang_page_hashes",
        "kvmask.hashing.sglang_seed",
    ),
    "Keys": (
        "kvmask.keys.KeySchema",
        "kvmask.StrictKeys",
        "kvmask.VllmKeys",
        "kvmask.keys.AscendKeys",
        "kvmask.keys.SglangKeys",
        "kvmask.keys.LMCacheKeys",
        "kvmask.keys.LMCacheObjectKeys",
        "kvmask.keys.fingerprint",
        "kvmask.keys.store_namespace",
    ),
    "Mooncake": (
        "kvmask.mooncake.connect",
        "kvmask.mooncake.local_master",
        "kvmask.mooncake.LocalMaster",
        "kvmask.mooncake.StoreConfig",
        "kvmask.mooncake.MooncakePolicy",
        "kvmask.mooncake.Code",
        "kvmask.mooncake.code_name",
        "kvmask.mooncake.is_final",
        "kvmask.mooncake.is_pressure",
        "kvmask.mooncake.is_success",
        "kvmask.mooncake.load_settings",
        "kvmask.mooncake.parse_size",
        "kvmask.mooncake.advertised_address",
        "kvmask.mooncake.find_master",
        "kvmask.mooncake.import_store",
    ),
    "Why a prompt does not hit": (
        "kvmask.why.diagnose",
        "kvmask.why.look_near",
        "kvmask.why.Diagnosis",
        "kvmask.why.GroupView",
        "kvmask.why.Shard",
        "kvmask.why.Reason",
        "kvmask.why.Near",
    ),
    "Errors": (
        "kvmask.errors.KVMaskError",
        "kvmask.errors.ArgumentError",
        "kvmask.errors.AlignmentError",
        "kvmask.errors.BlockIdError",
        "kvmask.errors.LayoutError",
        "kvmask.errors.KeyFormatError",
        "kvmask.errors.HashInputError",
        "kvmask.errors.PlanStateError",
        "kvmask.errors.StoreError",
        "kvmask.errors.MissingDependencyError",
        "kvmask.errors.UnsupportedReleaseError",
        "kvmask.errors.KeyFormatWarning",
        "kvmask.errors.StoreConfigWarning",
    ),
}

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def resolve(path: str) -> object:
    """Return what a dotted path names.

    Raises:
        AttributeError: There is no such name.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def entry(path: str) -> str:
    """Return the directive for one name."""
    item = resolve(path)
    if isinstance(item, type):
        options = ":members:", ":inherited-members: object, int, tuple, Exception"
        # A plain class and a tuple with names need not say so.
        if item.__base__ not in (object, tuple):
            options += (":show-inheritance:",)
        if issubclass(item, enum.Enum):
            options = ":members:", ":undoc-members:"
        return f".. autoclass:: {path}\n" + "".join(f"   {option}\n" for option in options)
    return f".. autofunction:: {path}\n"


def reference(title: str, names: tuple[str, ...]) -> str:
    """Return a page of the reference."""
    entries = "\n".join(map(entry, names))
    return f"{title}\n{'=' * len(title)}\n\n.. py:currentmodule:: kvmask\n\n{entries}"


def page(text: str, path: Path) -> str:
    """Return a page with the links that the HTML has."""

    def kept(found: re.Match[str]) -> str:
        shown, target = found.groups()
        file = (path.parent / target.partition("#")[0]).resolve()
        if "://" in target or target.startswith("#") or file.suffix == ".md":
            return found[0]
        return found[0] if file.parent in (ROOT / "examples", FIGURES) else shown

    return _LINK.sub(kept, text)


def prepare(source: Path) -> None:
    """Write what Sphinx reads."""
    shutil.rmtree(source, ignore_errors=True)
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    for path in pages:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page(path.read_text(encoding="utf-8"), path), encoding="utf-8")
    shutil.copytree(ROOT / "examples", source / "examples", ignore=lambda *_: ["__pycache__"])
    shutil.copytree(FIGURES, source / "docs" / FIGURES.name)
    (source / "api").mkdir()
    names = []
    for title, listed in REFERENCE.items():
        names.append(f"api/{title.lower().replace(',', '').replace(' ', '-')}")
        (source / f"{names[-1]}.rst").write_text(reference(title, listed), encoding="utf-8")
    docs = [f"docs/{path.stem}" for path in pages if path.parent != ROOT]
    docs.sort(key=lambda name: name != "docs/connector")  # it is where most begin
    about = [path.stem for path in pages if path.parent == ROOT and path.stem != "README"]
    toctrees = (("Pages", [*docs, *about]), ("Reference", names))
    index = "kvmask\n======\n\n.. toctree::\n   :hidden:\n\n   README\n"
    for caption, listed in toctrees:
        index += f"\n.. toctree::\n   :caption: {caption}\n   :maxdepth: 1\n\n"
        index += "".join(f"   {name}\n" for name in listed)
    (source / "index.rst").write_text(index, encoding="utf-8")


def command(settings: Path, source: Path, out: Path) -> list[str]:
    """Return the command that builds HTML, in which a warning is an error."""
    options = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(settings)]
    return [sys.executable, "-m", "sphinx", *options, "-d", f"{out}-trees", str(source), str(out)]


def main() -> int:
    """Build, and return the exit status."""
    source = BUILD / "source"
    prepare(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = command(ROOT / "docs", source, BUILD / "html")
    try:
        done = subprocess.run(words, timeout=TIMEOUT, env=environment, check=False)
    except subprocess.TimeoutExpired:
        print(f"the documentation was not built within {TIMEOUT} s")
        return 1
    if done.returncode == 0:
        print(f"{(BUILD / 'html' / 'index.html').relative_to(ROOT)}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
