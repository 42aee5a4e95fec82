"""Draws a measurement: throughput over workers and over memory, with the limits as lines. Needs matplotlib."""

from __future__ import annotations

from shmloader.errors import MissingExtra, human_bytes
from shmloader.plan import MemoryPlan

from .tune_measure import Measurement, Row

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingExtra("matplotlib", "plot", "draw the measurement") from error

_SHARED = "#4477aa"
_CHOSEN = "#cc3311"
_LIMIT = "#888888"


def draw(plan: MemoryPlan, measured: Measurement, path: str) -> None:
    """Write the picture to ``path``; its ending chooses the format. Opens no window. Raises OSError, ValueError."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    over_workers, over_memory = figure.subplots(1, 2, sharey=True)
    _over_workers(over_workers, plan, measured)
    _over_memory(over_memory, plan, measured)
    name = plan.data.path or "dataset"
    figure.suptitle(f"{name}: batches of {plan.batch.batch_size}, {human_bytes(plan.batch.batch_bytes)} each")
    figure.savefig(path, dpi=120)


def _over_workers(axes: Axes, plan: MemoryPlan, measured: Measurement) -> None:
    prefetches = sorted({row.prefetch_factor for row in measured.rows if row.num_workers})
    for place, prefetch in enumerate(prefetches):
        rows = sorted((r for r in measured.rows if r.prefetch_factor == prefetch and r.num_workers), key=_workers)
        shade = 1.0 - 0.7 * place / max(1, len(prefetches))
        style = "o-" if len(rows) > 1 else "o"
        axes.plot([r.num_workers for r in rows], _rates(rows), style, color=_SHARED, alpha=shade, label=f"{prefetch}")
    alone = [row for row in measured.rows if not row.num_workers]
    if alone:
        axes.plot([0], _rates(alone), "s", color="#228833", label="no workers")
    _mark(axes, measured.chosen.num_workers, measured.chosen)
    cpus = plan.host.cpus.usable / plan.local_ranks
    _line(axes, cpus, f"{cpus:g} CPUs")
    axes.set_xlabel("workers")
    axes.set_ylabel("samples per second")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.12 * max(_rates(list(measured.rows))))  # room for labels above the points
    axes.legend(title="batches per worker", loc="best", fontsize="small")


def _over_memory(axes: Axes, plan: MemoryPlan, measured: Measurement) -> None:
    unit, name = _unit(max(row.shared_bytes for row in measured.rows))
    rows = sorted(measured.rows, key=lambda row: row.shared_bytes)
    axes.plot([r.shared_bytes / unit for r in rows], _rates(rows), "o", color=_SHARED)
    near: list[float] = []
    for row in rows:
        place = row.shared_bytes / unit
        # Rows of one arena size stand above each other; their labels take turns above and below.
        below = len([other for other in near if abs(other - place) < 1e-9]) % 2
        near.append(place)
        axes.annotate(
            f"{row.num_workers}x{row.prefetch_factor}",
            (place, row.samples_per_s),
            textcoords="offset points",
            xytext=(0, -13 if below else 7),
            ha="center",
            fontsize="small",
        )
    _mark(axes, measured.chosen.shared_bytes / unit, measured.chosen)
    axes.set_xlabel(f"shared memory of one loader, {name} (label: workers x batches each)")
    most = max(row.shared_bytes for row in rows) / unit
    limits = [(plan.limit.nbytes_free / plan.local_ranks, plan.limit.name)]
    if plan.host.shm is not None:
        limits.append((plan.host.shm.nbytes_free / plan.local_ranks, plan.host.shm.source))
    beyond = []
    for nbytes, label in limits:
        if nbytes / unit <= 3 * most:
            _line(axes, nbytes / unit, f"{label}: {human_bytes(int(nbytes))}")
        else:
            beyond.append(f"{label}: {human_bytes(int(nbytes))}")
    if beyond:  # far to the right: drawn to scale it would press all points together
        axes.set_title("beyond the right edge: " + "; ".join(beyond), fontsize="small", color=_LIMIT, loc="right")
    axes.set_xlim(left=0)
    axes.margins(x=0.12)


def _workers(row: Row) -> int:
    return row.num_workers


def _rates(rows: list[Row]) -> list[float]:
    return [row.samples_per_s for row in rows]


def _mark(axes: Axes, place: float, chosen: Row) -> None:
    axes.plot([place], [chosen.samples_per_s], "o", ms=15, mfc="none", mec=_CHOSEN, mew=2, label="chosen")


def _line(axes: Axes, place: float, label: str) -> None:
    axes.axvline(place, color=_LIMIT, linestyle="--", linewidth=1)
    axes.annotate(
        label,
        (place, 0.02),
        xycoords=("data", "axes fraction"),
        rotation=90,
        ha="right",
        va="bottom",
        fontsize="small",
        color=_LIMIT,
    )


def _unit(nbytes: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return 1024**power, name
    return 1, "bytes"
