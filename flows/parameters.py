"""The parameters of all flows: what each means, and which values Prefect's form accepts."""

from typing import Annotated, Any, Literal

from pydantic import Field

from flows.launcher import MOST_RESTARTS
from flows.slots import MOST_SLOTS

RANGES = r"\d+(-\d+)?(,\d+(-\d+)?)*"


def described(text: str, **rules: Any) -> Any:
    """A field with these rules and an explanation in Prefect's parameter schema.

    Prefect puts the descriptions of docstrings over those of fields, and nothing where there are
    none; what the schema itself says stays.
    """
    return Field(description=text, json_schema_extra={"description": text}, **rules)


Override = Annotated[str, Field(pattern=r"^[^=]+=")]

Out = Annotated[
    str,
    described(
        "Root of the mixed dataset: a folder that the flow's machine sees, or a URL as "
        "s3://BUCKET/FOLDER or gs://BUCKET/FOLDER. What is there already is kept.",
        min_length=1,
    ),
]
BuildConfigFile = Annotated[
    str,
    described(
        "YAML file of the build's settings: a path on the flow's machine, or a URL as "
        "s3://BUCKET/build.yaml. Empty: go on with what the root was begun with."
    ),
]
TrainConfigFile = Annotated[
    str,
    described(
        "YAML file of the training's settings: a path on the flow's machine, or a URL as "
        "s3://BUCKET/csm.yaml.",
        min_length=1,
    ),
]
StudyConfigFile = Annotated[
    str,
    described(
        "YAML file of the study: a path on the flow's machine, or a URL as s3://BUCKET/study.yaml.",
        min_length=1,
    ),
]
Overrides = Annotated[
    list[Override],
    described("Settings put over those of the file, each as section.key=value: mixing.seed=7."),
]
BuildOverrides = Annotated[
    list[Override],
    described(
        "Settings put over those of the file, each as section.key=value: mixing.seed=7. Without a "
        "file only where things lie on the flow's machine: generator.model=PLACE."
    ),
]
AnnotationOverrides = Annotated[
    list[Override],
    described("What the labels differ in from the root's own, as annotation.scale=4."),
]
EvaluationOverrides = Annotated[
    list[Override],
    described("What is measured otherwise than before, as evaluation.bins=20."),
]
Slots = Annotated[
    int,
    described(
        "Worker processes. 0: one a visible GPU, or one without; on a Dask or Ray cluster that "
        "is there, one a worker or GPU.",
        ge=0,
        le=MOST_SLOTS,
    ),
]
Trainers = Annotated[
    int,
    described("Trainers at a time. 0: one a visible GPU, or one.", ge=0, le=MOST_SLOTS),
]
Runner = Annotated[
    Literal["local", "dask", "ray"],
    described("Where the slots are: on the flow's machine, or on a Dask or Ray cluster."),
]
Cluster = Annotated[
    str,
    described(
        "Address of the Dask scheduler or Ray head, as tcp://HOST:8786 or ray://HOST:10001. "
        "Empty: a cluster of the flow's own, on its machine."
    ),
]
Range = Annotated[
    str,
    described(
        "Which part of the shards this run begins with, counted from 0, as 1/4: several machines "
        "share a build so. Empty: all.",
        pattern=r"^(\d+/\d+)?$",
    ),
]
Shards = Annotated[
    str, described("Only these shards, as in 3,7-9. Empty: all.", pattern=rf"^({RANGES})?$")
]
RetryFailed = Annotated[
    bool, described("Only shards that failed before and are missing; not with skip_failed.")
]
SkipFailed = Annotated[
    str,
    described(
        "Leave out shards that failed, and end well without them if they are at most so many, as "
        "5, or this share of all, as 1%. Empty: a shard that fails makes the run fail.",
        pattern=r"^(\d+|\d+(\.\d+)?%)?$",
    ),
]
Full = Annotated[bool, described("First read every byte and image that is there, not only sizes.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    described("What the networks run on; auto takes a GPU if there is one, cuda demands it."),
]
Root = Annotated[
    str, described("Root of a mixed dataset, a path or URL; its images are kept.", min_length=1)
]
BakedOut = Annotated[
    str, described("Place of a new root to bake the labels into. Empty: beside the images.")
]
RunFolder = Annotated[
    str, described("Folder of the run, on the flow's machine; made if new.", min_length=1)
]
TrainedRun = Annotated[
    str, described("Folder of a trained run, on the flow's machine.", min_length=1)
]
StudyFolder = Annotated[
    str,
    described(
        "Folder of the study, on the flow's machine; what is measured there is kept.", min_length=1
    ),
]
StoryFolder = Annotated[
    str,
    described("Folder for everything, on the flow's machine; what is there is kept.", min_length=1),
]
Cells = Annotated[
    list[str],
    described("Only these cells, as DATASET/METHOD with * and ?, as in digits/*. Empty: all."),
]
Seeds = Annotated[int, described("Training runs a method.", ge=1)]
Fresh = Annotated[bool, described("Run the networks even where their logits are stored.")]
Processes = Annotated[
    int, described("Training processes over all machines, one a GPU; 1 without.", ge=1)
]
Machines = Annotated[
    int, described("Machines that train together; each has a run of its own.", ge=1)
]
MachineRank = Annotated[
    int, described("Which of the machines this one is; 0 is the main one.", ge=0)
]
MainProcess = Annotated[
    str,
    described(
        "Address of the main machine, as 10.0.0.1:29500; needed with several machines.",
        pattern=r"^(\S+:\d+)?$",
    ),
]
Restarts = Annotated[
    int,
    described(
        "How often a trainer that was killed or crashed is started again from its checkpoint, "
        "after a pause that grows from 10 seconds to 10 minutes.",
        ge=0,
        le=MOST_RESTARTS,
    ),
]
