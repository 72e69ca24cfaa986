"""How many series each pair of classes gets by a run's classifiers."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from semix.data.errors import InputError
from semix.data.formats import PairWeighting, SeriesByRun
from semix.data.settings import whole_path
from semix.pipeline.class_sets import share_series
from semix.pipeline.config import BuildConfig, PairsConfig
from semix.pipeline.plan import Build
from semix.pipeline.root import create_build


def share_by_run(
    run: str | Path,
    total: int,
    *,
    by: PairWeighting,
    even: float,
    class_names: Sequence[str],
    device: str = "auto",
) -> SeriesByRun:
    """Distribute `total` series over pairs of classes by the classifiers of a run.

    Args:
        even: share of the series that is distributed evenly.
    Raises:
        InputError: see `semix.calib.pair_weights.weigh_pairs`.
    """
    from semix.calib.pair_weights import weigh_pairs  # imports torch

    folder = Path(run).expanduser()
    pairs = weigh_pairs(folder, by, class_names=class_names, device=device)
    series = share_series(pairs.weights, total, even=even)
    return SeriesByRun(
        run=whole_path(folder), digest=pairs.digest, by=by, images=pairs.images, series=series
    )


def start_build(config: BuildConfig, url: str, *, device: str = "auto") -> Build:
    """Start the root of a build, or open it to continue, as `create_build`.

    Raises:
        InputError: as `create_build`; or the run that determines its pairs cannot be used.
    """
    share = partial(series_of_config, device=device)
    return create_build(config, url, device=device, share_by_run=share)


def series_of_config(
    config: BuildConfig, class_names: Sequence[str], *, device: str = "auto"
) -> SeriesByRun:
    """The series per pair that the run in `mixing.pairs` determines.

    Raises:
        InputError: as `share_by_run`; or a class gets no series at all.
    """
    pairs, classes = config.mixing.pairs, len(class_names)
    assert pairs.run is not None, "of kind confused"
    total = config.mixing.groups_per_pair * classes * (classes - 1) // 2
    shared = share_by_run(
        pairs.run, total, by=pairs.by, even=pairs.even, class_names=class_names, device=device
    )
    check_classes(shared, class_names, pairs)
    return shared


def check_classes(shared: SeriesByRun, class_names: Sequence[str], pairs: PairsConfig) -> None:
    """Raise InputError if some class is in no series, as training draws a series of each class."""
    counts = Counter(k for first, second, _ in shared.series for k in (first, second))
    if missing := [name for k, name in enumerate(class_names) if not counts[k]]:
        remedy = f"leaves class {missing[0]!r} without a series; raise it, or groups_per_pair"
        raise InputError("mixing.pairs.even", pairs.even, remedy)
