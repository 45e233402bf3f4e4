"""Which of an engine's profiles a forward runs in, and which shapes a profile means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from eagle_run.bundle.records import EngineProfile
from eagle_run.bundle.tensors import TensorSpec
from eagle_run.errors import EagleError

Shape = tuple[int, ...]


def fits(profile: EngineProfile, sizes: Mapping[str, int]) -> bool:
    """Whether a forward with these sizes of the graph's axes can run in the profile."""
    return all(axis.min <= sizes[name] <= axis.max for name, axis in profile.axes.items() if name in sizes)


def narrowest(graph: str, profiles: Sequence[EngineProfile], sizes: Mapping[str, int]) -> int:
    """Place of the profile for a forward of these sizes: of those that hold it, the one with the fewest rows.

    Kernels are chosen for the usual sizes of a profile, and the fewer rows it may have to hold, the nearer
    those are. Raises EagleError, naming what each profile holds, when none does.
    """
    holding = [place for place, profile in enumerate(profiles) if fits(profile, sizes)]
    if not holding:
        wanted = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise EagleError(
            f"the {graph} engine has no profile for {wanted}; it has {'; '.join(map(_ranges, profiles))}",
            hint="take a smaller tree, batch or chunk, or compile the bundle again with all profiles: "
            "`eagle-export compile BUNDLE`",
            parameters=["tree", "batch"],
        )

    def width(place: int) -> tuple[int, int]:
        axes = profiles[place].axes
        return axes["T"].max, prod(axis.max for axis in axes.values())

    return min(holding, key=width)


def tensor_range(tensor: TensorSpec, profile: EngineProfile) -> tuple[Shape, Shape, Shape]:
    """(smallest, tuned, largest) shape of an input in a profile."""
    ranges = [
        (size, size, size)
        if isinstance(size, int)
        else (profile.axes[size].min, profile.axes[size].opt, profile.axes[size].max)  # type: ignore[index]
        for size in tensor.shape
    ]
    least, tuned, most = zip(*ranges, strict=True)
    return least, tuned, most


def _ranges(profile: EngineProfile) -> str:
    sizes = (
        f"{name} {axis.min}" + (f"–{axis.max}" if axis.max > axis.min else "")
        for name, axis in profile.axes.items()
    )
    return f"{profile.name} ({', '.join(sizes)})"
