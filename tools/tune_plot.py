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
_LIMIT = "#777777"
_SCALE_ENDS = 3.0  # times the largest arena that was tried: limits further away stand behind a break of the axis


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
    _label(axes, rows, unit)
    _mark(axes, measured.chosen.shared_bytes / unit, measured.chosen)
    axes.set_xlabel(f"shared memory of one loader, {name} (label: workers x batches each)")
    most = max(row.shared_bytes for row in rows) / unit
    limits = [(plan.limit.nbytes_free / plan.local_ranks, plan.limit.name)]
    if plan.host.shm is not None and not plan.host.shm.unlimited:
        limits.append((plan.host.shm.nbytes_free / plan.local_ranks, plan.host.shm.source))
    limits.sort()
    near = [limit for limit in limits if limit[0] / unit <= _SCALE_ENDS * most]
    far = limits[len(near) :]
    end = max(1.2 * most, *(1.08 * nbytes / unit for nbytes, _ in near), 0.0)
    for nbytes, label in near:
        _line(axes, nbytes / unit, f"{label}: {human_bytes(int(nbytes))}")
    if far:
        # Drawn to scale they would press all points together: the axis is broken, and they stand behind the break.
        end = _break(axes, end, [f"{label}: {human_bytes(int(nbytes))}" for nbytes, label in far])
    axes.set_xlim(0, end)


def _label(axes: Axes, rows: list[Row], unit: int) -> None:
    """Write workers x batches beside each point; labels of one arena size are moved apart where they would overlap."""
    step = 0.045 * max(_rates(rows))
    ends: dict[int, float] = {}  # by arena size: where the last label stands
    for row in sorted(rows, key=lambda row: row.samples_per_s):
        height = max(row.samples_per_s, ends.get(row.shared_bytes, -step) + step)
        ends[row.shared_bytes] = height
        axes.annotate(
            f"{row.num_workers}x{row.prefetch_factor}",
            (row.shared_bytes / unit, height),
            textcoords="offset points",
            xytext=(12, 0),
            ha="left",
            va="center",
            fontsize="small",
        )


def _break(axes: Axes, place: float, labels: list[str]) -> float:
    """Break the axis at ``place``, draw a line behind it for each label, and return where the axis then ends."""
    step = 0.09 * place
    for number, label in enumerate(labels):
        _line(axes, place + (1.2 + number) * step, label)
    for shift in (0.0, 0.15):
        axes.plot(
            [place + shift * step, place + (shift + 0.15) * step],
            [-0.015, 0.015],
            color="black",
            linewidth=1,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
        )
    ticks = MaxNLocator(nbins=6).tick_values(0, place)
    axes.set_xticks([tick for tick in ticks if 0 <= tick < place])
    return place + (len(labels) + 1) * step


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
