"""The class prototypes of a label set, measured once."""

import json
from collections.abc import Callable

from data.label_sets import LabelSet
from data.real import RealDataConfig
from data.root import PROTOTYPES
from data.settings import load_settings
from pipeline.prototypes import measure, remove_chunks
from pipeline.relabel.sets import IMAGES, ROOT, annotation_of, prototypes_name


def ensure_set_prototypes(
    labels: LabelSet, *, device: str = "auto", beat: Callable[[], None] = lambda: None
) -> None:
    """Measure what the set needs of the real training split, or take it from where it is known.

    Prototypes of the root, or of the set whose features serve this one, are of the same encoder:
    then neither CLIP nor the real images are touched.
    """
    store, name = labels.store, prototypes_name(labels)
    if store.exists(name):
        return
    beside = _beside_features(labels)
    known = store.get(beside) if store.exists(beside) else None
    content = measure(
        annotation_of(labels),
        load_settings(RealDataConfig, labels.root.plan["config"]["real"]),
        device=device,
        identity=json.loads(json.dumps(labels.plan["encoders"])),
        store=store,
        known=known,
        beat=beat,
    )
    store.create(name, content)
    remove_chunks(store)


def _beside_features(labels: LabelSet) -> str:
    """The prototypes of the encoder that made the features which this set uses."""
    source = labels.plan["features"]
    if source in (ROOT, IMAGES):
        return PROTOTYPES
    return prototypes_name(LabelSet(labels.root, source))
