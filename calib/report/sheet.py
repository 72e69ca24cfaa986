"""Which mixed series the report shows."""

import numpy as np

from data.dataset import MixedDataset
from data.pages import Series, fixed, series_figure
from data.quality import spearman
from data.series import spread_over_sets


def contact_sheet(mixed: MixedDataset, count: int = 12) -> list[Series]:
    """Series spread evenly over the class pairs, then the one that follows alpha least.

    Chosen by position, never by looks, so that the sheet shows what the dataset holds.
    """
    rho = spearman(mixed.alphas, mixed.weights)
    worst = int(rho.argmin())
    _, sets = np.unique(mixed.classes.numpy(), axis=0, return_inverse=True)
    chosen = [group for group in spread_over_sets(sets, count - 1) if group != worst]
    notes = {group: f"\N{GREEK SMALL LETTER RHO} {fixed(float(rho[group]))}" for group in chosen}
    notes[worst] = f"least ordered of all, \N{GREEK SMALL LETTER RHO} {fixed(float(rho[worst]))}"
    return [_series(mixed, group, note) for group, note in notes.items()]


def _series(mixed: MixedDataset, group: int, note: str) -> Series:
    record, series = mixed.groups[group], mixed[group]
    labels = [[(k, float(label[k])) for k in record.classes] for label in series["labels"]]
    record = record.model_copy(update={"labels": labels})
    return series_figure(record, series["images"].numpy(), note=note)
