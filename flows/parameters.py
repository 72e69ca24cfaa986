"""What commands and flows are given: each described once, for `--help` and for Prefect's form."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from semix.data.ranges import parse_ranges
from semix.flows.launcher import MOST_RESTARTS
from semix.flows.slots import MOST_SLOTS
from typer.models import ArgumentInfo, OptionInfo

MORE = "More options"  # a panel of `--help`, for what most runs do without
RANGES = r"\d+(-\d+)?(,\d+(-\d+)?)*"
OVERRIDE = {"items_schema": {"type": "str", "pattern": r"^[^=]+="}}
NOT_EMPTY = {"min_length": 1}


class _Field:
    """Typer's description of a parameter, as pydantic reads it in the signature of a flow.

    Prefect puts the descriptions of docstrings over those of fields, and nothing where there are
    none; what the schema itself says stays.

    Args:
        text: what it is, for both; a page of help has a line or two for it.
        flags: of an option; by default made of the parameter's name.
        more: what a form has room for.
        rules: which values Prefect refuses, as keys of a schema of pydantic-core.
        shown: how Typer shows it.
    """

    def __init__(
        self,
        text: str,
        *flags: str,
        more: str = "",
        rules: Mapping[str, Any] = {},
        **shown: Any,
    ) -> None:
        limits = {"min": rules.get("ge"), "max": rules.get("le")}
        super().__init__(default=..., param_decls=flags, help=text, **limits, **shown)  # type: ignore[call-arg]
        self.rules = rules
        self.description = f"{text[0].upper()}{text[1:]}. {more}".strip()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), **self.rules}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {**handler(schema), "description": self.description}


class Option(_Field, OptionInfo):
    """`--name VALUE`, and a field."""


class Argument(_Field, ArgumentInfo):
    """A word of the command line, and a field."""


# Settings


def _overrides(example: str, more: str = "") -> Option:
    text = f"a setting, as {example}; repeatable"
    return Option(text, "--set", metavar="KEY=VALUE", more=more, rules=OVERRIDE)


def _config(more: str, **rules: Any) -> Argument:
    return Argument("YAML file: a path or URL", metavar="CONFIG", more=more, rules=rules)


OF_FILE = "A path is a whole one, on the worker's machine."
Config = Annotated[str, _config(OF_FILE, **NOT_EMPTY)]
OptionalConfig = Annotated[
    str, _config(f"{OF_FILE} Empty: go on with what the root was begun with.")
]
OVER_FILE = "Put over those of the file."
BuildOverrides = Annotated[
    list[str],
    _overrides(
        "mixing.seed=7",
        f"{OVER_FILE} Without a file only where things lie on the worker's machine: "
        "generator.model=PLACE.",
    ),
]
PlaceOverrides = Annotated[list[str], _overrides("generator.model=PLACE")]
AnnotationOverrides = Annotated[
    list[str], _overrides("annotation.scale=4", "What the labels differ in from the root's own.")
]
TrainOverrides = Annotated[list[str], _overrides("epochs=300", OVER_FILE)]
StudyOverrides = Annotated[list[str], _overrides("base.epochs=10", OVER_FILE)]
EvaluationOverrides = Annotated[
    list[str], _overrides("evaluation.bins=20", "What is measured otherwise than before.")
]
RealOverrides = Annotated[list[str], _overrides("real.image_size=48")]

# Places

Root = Annotated[
    str,
    Argument(
        "root of a mixed dataset: a path or URL",
        metavar="ROOT",
        more="Its images are kept.",
        rules=NOT_EMPTY,
    ),
]
Out = Annotated[
    str,
    Option(
        "root of the mixed dataset: a path or URL",
        metavar="ROOT",
        more="A path is a whole one, on the worker's machine; what is there already is kept.",
        rules=NOT_EMPTY,
    ),
]
BakedOut = Annotated[
    str,
    Option("a new root to bake the labels into", metavar="ROOT", more="Empty: beside the images."),
]
RunFolder = Annotated[
    str,
    Option(
        "folder of the run; machines that train together share it",
        metavar="RUN",
        more="On the worker's machine; made if new.",
        rules=NOT_EMPTY,
    ),
]
TrainedRun = Annotated[
    str,
    Argument(
        "folder of a trained run", metavar="RUN", more="On the worker's machine.", rules=NOT_EMPTY
    ),
]
EvaluationFile = Annotated[
    str,
    Option(
        "file to write; default: the run's own evaluation.json, or evaluation-DIGEST.json beside "
        "it under other settings",
        "--to",
        metavar="FILE",
        more="On the worker's machine.",
    ),
]
StudyFolder = Annotated[
    str,
    Option(
        "folder of the study",
        metavar="FOLDER",
        more="On the worker's machine; what is measured there is kept.",
        rules=NOT_EMPTY,
    ),
]
StoryFolder = Annotated[
    str,
    Option(
        "folder for everything",
        metavar="FOLDER",
        more="On the worker's machine; what is there is kept.",
        rules=NOT_EMPTY,
    ),
]

# Slots and devices

Slots = Annotated[
    int,
    Option(
        "worker processes; 0: one a GPU, or one",
        metavar="N",
        more="On a Dask or Ray cluster that is there, 0 is one a worker or GPU.",
        rules={"ge": 0, "le": MOST_SLOTS},
    ),
]
Runner = Annotated[
    Literal["local", "dask", "ray"],
    Option(
        "where the worker processes are",
        more="On the machine of the run, or on a Dask or Ray cluster.",
        rich_help_panel=MORE,
    ),
]
Cluster = Annotated[
    str,
    Option(
        "address of a Dask or Ray cluster; default: one of our own",
        metavar="ADDRESS",
        more="The Dask scheduler or Ray head, as tcp://HOST:8786 or ray://HOST:10001.",
    ),
]
Range = Annotated[
    str,
    Option(
        "begin with this part of the shards, as 0/4",
        metavar="i/n",
        more="Counted from 0: several machines share a build so. Empty: all.",
        rules={"pattern": r"^(\d+/\d+)?$"},
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Option("what networks run on", more="auto takes a GPU if there is one, cuda demands it."),
]

# Which shards

Shards = Annotated[
    str,
    Option(
        "only these shards, as in 3,7-9",
        metavar="LIST",
        more="Empty: all.",
        rules={"pattern": rf"^({RANGES})?$"},
    ),
]
RetryFailed = Annotated[
    bool,
    Option(
        "only shards that failed before and are missing",
        "--retry-failed",
        more="Not with skip_failed.",
    ),
]
SkipFailed = Annotated[
    str,
    Option(
        "leave out shards that fail; end well if they are at most so many, as 5 or 1%",
        metavar="LIMIT",
        more="Empty: a shard that fails makes the run fail.",
        rules={"pattern": r"^(\d+|\d+(\.\d+)?%)?$"},
    ),
]
Full = Annotated[
    bool, Option("first read every byte and image", "--full", more="Otherwise sizes alone.")
]

# Training

Processes = Annotated[
    int, Option("processes over all machines, one a GPU", metavar="N", rules={"ge": 1})
]
Machines = Annotated[
    int,
    Option(
        "machines that train together; run this on each of them",
        metavar="N",
        rules={"ge": 1},
        rich_help_panel=MORE,
    ),
]
MachineRank = Annotated[
    int, Option("which of them this is; 0 is the main one", metavar="N", rules={"ge": 0})
]
MainProcess = Annotated[
    str,
    Option(
        "address of the main machine, as 10.0.0.1:29500",
        metavar="HOST:PORT",
        more="Needed with several machines.",
        rules={"pattern": r"^(\S+:\d+)?$"},
    ),
]
Restarts = Annotated[
    int,
    Option(
        "start a trainer that was killed or crashed so often again",
        metavar="N",
        more="From its checkpoint, after a pause that grows from 10 seconds to 10 minutes.",
        rules={"ge": 0, "le": MOST_RESTARTS},
    ),
]
Trainers = Annotated[
    int,
    Option(
        "trainers at a time; 0: one a GPU, or one",
        metavar="N",
        rules={"ge": 0, "le": MOST_SLOTS},
    ),
]
Cells = Annotated[
    list[str],
    Option(
        "only these cells: DATASET/METHOD, as digits/ce or '*/ce'; repeatable",
        metavar="CELL",
        more="Empty: all.",
    ),
]
Seeds = Annotated[int, Option("training runs a method", metavar="N", rules={"ge": 1})]
Fresh = Annotated[bool, Option("run the networks even where logits are stored", "--fresh")]

# Of commands alone

Labels = Annotated[str, Option("of a label set; default: those in the shards", metavar="DIGEST")]
Index = Annotated[str, Option("as index/3.json; default: the newest", metavar="NAME")]
Price = Annotated[
    str,
    Option("what an hour of one GPU costs", metavar="AMOUNT", more="As 2.49 or '2.49 EUR'."),
]
Json = Annotated[bool, Option("machine-readable output", "--json")]


def chosen(shards: str) -> frozenset[int]:
    return frozenset(parse_ranges(shards) if shards else ())
