"""The shape of the repository is a test: floors, lengths, and which module alone may know what.

FLOORS is the table. A module imports only from rows below its own; a package (``packfile``, ...) stands on one floor
as a whole, and inside it there are no circles. Imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "shmloader"
TOOLS = ROOT / "tools"
LONGEST = 350  # lines: what one sitting can hold

# Lowest first. Steps of one floor (1a, 1b) are rows of their own: each may use the row before it.
FLOORS: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (floor, frozenset(modules.split()))
    for floor, modules in (
        ("0  what goes wrong", "errors"),
        ("0a what the kernel tells and does", "cgroups prefault"),
        ("0b where pages lie", "placement"),
        (
            "1a facts and parts",
            (
                "arena_stats badsamples cap compute_threads deathwatch doorbell extents failure images interrupts "
                "layout lifeline order pinning randomstates segment slot sparse unequal"
            ),
        ),
        ("1b facts together", "drain limits mailbox robustness watch witness"),
        ("1c what the host has left", "host_room oom"),
        ("1d memory taken and given back", "pieces"),
        ("1e slots made and retired", "slot_table"),
        ("2a slots and sizes", "arena budget"),
        ("2b all arenas of a loader, all that is under way in them", "arenas tickets"),
        ("3a data and batches", "packfile collate batch collates"),
        ("3b batches described", "columns delivery describe redirect"),
        ("3c batches made", "fetch"),
        ("3d packs in batches, orders for a worker", "gathering orders"),
        ("3e who a worker is, what it sends", "identity publisher"),
        ("4  one process's part", "worker device"),
        ("5  the processes", "pool"),
        ("5b waiting for them, giving them work", "dispatch replies room"),
        ("5c replacing them", "revival"),
        ("6a one pass", "passes"),
        ("6b one pass with workers", "worker_pass iterator"),
        ("7a the front", "loader"),
        # Planning measures the loader itself, from outside: nothing below knows of it.
        ("7b a trial of the loader", "probe"),
        # Packing reads through the loader, as its first user.
        ("7b reading for packs", "sources"),
        ("7c what data takes", "facts"),
        ("7d a plan for it", "plan"),
        ("8  the names that users import", "__init__"),
    )
)
ROW = {module: row for row, (_, modules) in enumerate(FLOORS) for module in modules}

# What only these modules may name: an attribute (``os.eventfd``) or an import, and what starts with it.
KNOWS_ALONE = {
    "os.eventfd": {"doorbell"},
    "os.memfd_create": {"segment"},
    "posix_ipc": {"segment"},
    "torch.cuda": {"pinning", "device"},
    "lmdb": {"packfile"},
    "PIL": {"images"},
}


class Source:
    """One parsed file of the library: its floor module (a package counts as one), its imports, its dotted names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
        self.module = self.parts[1]
        self.tree = ast.parse(path.read_text(), str(path))

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yield absolute dotted names and their lines. ``from . import x`` gives ``shmloader.x``."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(self.parts[: -node.level]) if node.level else ""
                start = ".".join(part for part in (base, node.module) if part)
                yield from ((f"{start}.{alias.name}", node.lineno) for alias in node.names)

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield imports, and dotted expressions that begin with a plain name: ``torch.cuda.is_available``."""
        yield from self.imports()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                dotted, inner = [node.attr], node.value
                while isinstance(inner, ast.Attribute):
                    dotted.append(inner.attr)
                    inner = inner.value
                if isinstance(inner, ast.Name):
                    yield ".".join([inner.id, *reversed(dotted)]), node.lineno


def sources() -> list[Source]:
    return [Source(path) for path in sorted(LIBRARY.rglob("*.py"))]


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith((prefix + ".", prefix + "_"))


def upward(source: Source) -> Iterator[str]:
    """Yield a sentence for each import of this file that does not go down."""
    for name, line in source.imports():
        parts = name.split(".")
        if parts[0] != "shmloader":
            continue
        target = parts[1] if len(parts) > 1 else "__init__"
        if target not in ROW:
            if (LIBRARY / f"{target}.py").exists() or (LIBRARY / target).is_dir():
                continue  # test_every_module_has_a_floor names it
            target = "__init__"  # ``from shmloader import DataLoader`` names the top, not a module
        if target != source.module and ROW[target] >= ROW[source.module]:
            yield (
                f"{source.path.relative_to(ROOT)}:{line}: {source.module} (floor {FLOORS[ROW[source.module]][0]}) "
                f"imports {name} (floor {FLOORS[ROW[target]][0]})"
            )


def test_every_module_has_a_floor() -> None:
    """A new module is put into FLOORS, where its author says what it may use."""
    missing = {source.module for source in sources()} - set(ROW)
    assert not missing, f"not in FLOORS of {Path(__file__).name}: {sorted(missing)}"


def test_imports_go_down() -> None:
    """No module imports from its own row or from above."""
    wrong = [sentence for source in sources() if source.module in ROW for sentence in upward(source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py")))
def test_a_package_has_no_circle(package: str) -> None:
    """Inside a package every import leads to a file that does not lead back."""
    graph: dict[str, set[str]] = {}
    for source in sources():
        if source.module == package:
            own = ".".join(source.parts).removesuffix(".__init__")
            graph[own] = {name for name, _ in source.imports() if inside(name, f"shmloader.{package}")}
    files = set(graph)
    # An imported name may be a module or something in one; the package itself stands for its __init__.
    edges = {own: {_file_of(name, files) for name in names} - {own} for own, names in graph.items()}
    finished: set[str] = set()

    def visit(own: str, trail: tuple[str, ...]) -> None:
        assert own not in trail, f"circle: {' -> '.join((*trail[trail.index(own) :], own))}"
        if own not in finished:
            for name in sorted(edges[own]):
                visit(name, (*trail, own))
            finished.add(own)

    for own in sorted(files):
        visit(own, ())


def _file_of(name: str, files: set[str]) -> str:
    while name not in files:
        name = name.rpartition(".")[0]
    return name


def test_the_library_does_not_know_its_tools() -> None:
    """No file of shmloader imports the command lines, the benchmarks or the tests."""
    outside = {"shmloader_tools", "tools", "benchmarks", "tests", "support", "harness"}
    wrong = [
        f"{source.path.relative_to(ROOT)}:{line}: {name}"
        for source in sources()
        for name, line in source.imports()
        if name.split(".")[0] in outside
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", KNOWS_ALONE)
def test_one_module_alone_knows(name: str) -> None:
    """What is platform or a library's business is named in one place."""
    wrong = [
        f"{source.path.relative_to(ROOT)}:{line}: {found} belongs to {', '.join(sorted(KNOWS_ALONE[name]))}"
        for source in sources()
        if source.module not in KNOWS_ALONE[name]
        for found, line in source.names()
        if inside(found, name)
    ]
    assert not wrong, "\n".join(wrong)


def python_files() -> list[Path]:
    folders = (LIBRARY, TOOLS, ROOT / "tests", ROOT / "benchmarks")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def test_no_file_is_too_long() -> None:
    """Every file can be read in one sitting."""
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in python_files()}
    too_long = {str(path): length for path, length in lengths.items() if length > LONGEST}
    assert not too_long, f"more than {LONGEST} lines: {too_long}"


def test_no_tool_hides_a_standard_module() -> None:
    """``python tools/inspect.py`` would put its folder first on the path and break the standard library."""
    folders = (TOOLS, ROOT / "tests", ROOT / "benchmarks")
    hidden = [path for folder in folders for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names]
    assert not hidden


def test_the_check_itself_can_fail() -> None:
    """An upward import is found in every spelling: absolute, relative, of a name, in a function."""
    spellings = (
        "from .pool import Pool",
        "from . import pool",
        "import shmloader.pool",
        "from shmloader import DataLoader",
        "def late():\n    from shmloader.pool import Pool",
        "if TYPE_CHECKING:\n    from .pool import Pool",
    )
    for text in spellings:
        source = Source(LIBRARY / "__init__.py")
        source.path, source.parts, source.module = LIBRARY / "arena.py", ("shmloader", "arena"), "arena"
        source.tree = ast.parse(text)
        assert len(list(upward(source))) == 1, text
    source.tree = ast.parse("from .errors import SlotMisuse\nfrom .segment import Segment\nimport os")
    assert not list(upward(source))
    source.tree = ast.parse("import torch\nif torch.cuda.is_available(): pass\nos.eventfd_write(1, 1)")
    found = {name for name, _ in source.names()}
    assert any(inside(name, "torch.cuda") for name in found)
    assert any(inside(name, "os.eventfd") for name in found)
