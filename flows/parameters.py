"""Parameters of commands and flows, each described once, for `--help` and for Prefect's form."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from typer.models import ArgumentInfo, OptionInfo

from semix.data.ranges import parse_ranges
from semix.flows.launcher import MAX_RESTARTS
from semix.flows.slots import MAX_SLOTS

MAX_ROUNDS = 100  # of a loop
MORE_PANEL = "More options"  # the `--help` panel of options that most runs do not need
RANGES = r"\d+(-\d+)?(,\d+(-\d+)?)*"
OVERRIDE = {"items_schema": {"type": "str", "pattern": r"^[^=]+="}}
NOT_EMPTY = {"min_length": 1}


class _Field:
    """A Typer parameter that also gives pydantic its limits and description, for a flow's form.

    Prefect overwrites field descriptions with the docstring's (or deletes them), so the description
    is put into the JSON schema, which Prefect leaves alone.

    Args:
        text: the description, shown in `--help` and in the form; keep it to two lines of a help
            page.
        flags: names of the option; by default the parameter's name.
        more: further description, only for the form.
        rules: the values that Prefect accepts, as keys of a schema of pydantic-core.
        typer_options: further arguments of Typer's class.
    """

    def __init__(
        self,
        text: str,
        *flags: str,
        more: str = "",
        rules: Mapping[str, Any] = {},
        **typer_options: Any,
    ) -> None:
        limits = {"min": rules.get("ge"), "max": rules.get("le")}
        super().__init__(default=..., param_decls=flags, help=text, **limits, **typer_options)  # type: ignore[call-arg]
        self.rules = rules
        self.description = f"{text[0].upper()}{text[1:]}. {more}".strip()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), **self.rules}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {**handler(schema), "description": self.description}


class Option(_Field, OptionInfo):
    """An option `--name VALUE` of a command, and a field of a flow's form."""


class Argument(_Field, ArgumentInfo):
    """A positional argument of a command, and a field of a flow's form."""


# Settings


def _overrides(example: str, more: str = "") -> Option:
    text = f"override a setting, as in {example}; repeatable"
    return Option(text, "--set", metavar="KEY=VALUE", more=more, rules=OVERRIDE)


def _config(more: str, **rules: Any) -> Argument:
    return Argument("path or URL of a YAML file", metavar="CONFIG", more=more, rules=rules)


PATH_NOTE = "A path must be absolute and on the worker's machine."
Config = Annotated[str, _config(PATH_NOTE, **NOT_EMPTY)]
OptionalConfig = Annotated[
    str, _config(f"{PATH_NOTE} Empty: continue with the settings that the root was begun with.")
]
OVERRIDE_NOTE = "It replaces the value in the file."
BuildOverrides = Annotated[
    list[str],
    _overrides(
        "mixing.seed=7",
        f"{OVERRIDE_NOTE} Without a config file, only settings that are paths on the worker's "
        "machine may be overridden: generator.model=PATH.",
    ),
]
PathOverrides = Annotated[list[str], _overrides("generator.model=PATH")]
AnnotationOverrides = Annotated[
    list[str], _overrides("annotation.scale=4", "Other settings are those of the root's labels.")
]
TrainOverrides = Annotated[list[str], _overrides("epochs=300", OVERRIDE_NOTE)]
LoopOverrides = Annotated[list[str], _overrides("series_per_pair=4", OVERRIDE_NOTE)]
StudyOverrides = Annotated[list[str], _overrides("base.epochs=10", OVERRIDE_NOTE)]
EvaluationOverrides = Annotated[
    list[str], _overrides("evaluation.bins=20", "Other settings are those of the run.")
]
RealOverrides = Annotated[list[str], _overrides("real.image_size=48")]

# Paths and URLs

Root = Annotated[
    str,
    Argument(
        "path or URL of a mixed dataset (its root)",
        metavar="ROOT",
        more="Its images are not changed.",
        rules=NOT_EMPTY,
    ),
]
Out = Annotated[
    str,
    Option(
        "path or URL where the mixed dataset is or will be",
        metavar="ROOT",
        more="A path must be absolute and on the worker's machine; existing shards stay.",
        rules=NOT_EMPTY,
    ),
]
BakedOut = Annotated[
    str,
    Option(
        "where to write a new mixed dataset with the new labels in its shards",
        metavar="ROOT",
        more="Empty: store the labels beside the images.",
    ),
]
RunFolder = Annotated[
    str,
    Option(
        "run folder; machines that train together share it",
        metavar="RUN",
        more="On the worker's machine; created if it does not exist.",
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
        "file to write; default: evaluation.json of the run, or evaluation-DIGEST.json if the "
        "settings differ from the run's",
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
        more="On the worker's machine; cells that are measured there are not run again.",
        rules=NOT_EMPTY,
    ),
]
LoopFolder = Annotated[
    str,
    Option(
        "folder of the loop",
        metavar="FOLDER",
        more="On the worker's machine; what is built and measured there stays.",
        rules=NOT_EMPTY,
    ),
]
QuickstartFolder = Annotated[
    str,
    Option(
        "folder for models, images, runs and report",
        metavar="FOLDER",
        more="On the worker's machine; finished steps are not run again.",
        rules=NOT_EMPTY,
    ),
]

# Slots and devices

Slots = Annotated[
    int,
    Option(
        "worker processes; 0: one per GPU, or a single one if there is no GPU",
        metavar="N",
        more="On an existing cluster, 0 means one per Dask worker or Ray GPU.",
        rules={"ge": 0, "le": MAX_SLOTS},
    ),
]
Runner = Annotated[
    Literal["local", "dask", "ray"],
    Option(
        "where worker processes run",
        more="On the machine of the run, or on a Dask or Ray cluster.",
        rich_help_panel=MORE_PANEL,
    ),
]
Cluster = Annotated[
    str,
    Option(
        "address of a Dask or Ray cluster; default: start one here",
        metavar="ADDRESS",
        more="The Dask scheduler or Ray head, as tcp://HOST:8786 or ray://HOST:10001.",
    ),
]
Range = Annotated[
    str,
    Option(
        "begin with this part of the shards, as in 0/4, then help with the others",
        metavar="i/n",
        more="Counted from 0; several machines share a build this way. Empty: all.",
        rules={"pattern": r"^(\d+/\d+)?$"},
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Option("device of the networks", more="auto uses a GPU if there is one; cuda requires one."),
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
        "only missing shards that failed before", "--retry-failed", more="Not with skip_failed."
    ),
]
SkipFailed = Annotated[
    str,
    Option(
        "succeed even if up to LIMIT shards failed, for example 5 or 1%",
        metavar="LIMIT",
        more="Shards that failed before are not tried again. Empty: a failed shard fails the run.",
        rules={"pattern": r"^(\d+|\d+(\.\d+)?%)?$"},
    ),
]
Full = Annotated[
    bool,
    Option(
        "before anything else, check the content of every file and image",
        "--full",
        more="Otherwise only file sizes are checked.",
    ),
]

# Training

Processes = Annotated[
    int, Option("training processes on all machines, one per GPU", metavar="N", rules={"ge": 1})
]
Machines = Annotated[
    int,
    Option(
        "machines that train together; run this on each of them",
        metavar="N",
        rules={"ge": 1},
        rich_help_panel=MORE_PANEL,
    ),
]
MachineRank = Annotated[
    int, Option("number of this machine; 0 is the main machine", metavar="N", rules={"ge": 0})
]
MainProcess = Annotated[
    str,
    Option(
        "address of the main machine, as in 10.0.0.1:29500",
        metavar="HOST:PORT",
        more="Required with several machines.",
        rules={"pattern": r"^(\S+:\d+)?$"},
    ),
]
Restarts = Annotated[
    int,
    Option(
        "how often to restart a trainer that was killed or crashed",
        metavar="N",
        more="It continues from its checkpoint, after a pause of 10 seconds to 10 minutes.",
        rules={"ge": 0, "le": MAX_RESTARTS},
    ),
]
Rounds = Annotated[
    int,
    Option(
        "how often series are added and all runs trained anew",
        metavar="N",
        rules={"ge": 1, "le": MAX_ROUNDS},
    ),
]
Trainers = Annotated[
    int,
    Option(
        "trainers that run at a time; 0: one per GPU, or a single one if there is no GPU",
        metavar="N",
        rules={"ge": 0, "le": MAX_SLOTS},
    ),
]
Cells = Annotated[
    list[str],
    Option(
        "run only this DATASET/METHOD, as in digits/ce or '*/ce'; repeatable",
        metavar="CELL",
        more="Empty: all.",
    ),
]
Seeds = Annotated[
    int, Option("number of seeds, that is, training runs per method", metavar="N", rules={"ge": 1})
]
Fresh = Annotated[bool, Option("compute logits again even if they are stored", "--fresh")]

# Parameters of commands, not of flows

Labels = Annotated[str, Option("label set; default: labels in the shards", metavar="DIGEST")]
Index = Annotated[str, Option("index, as in index/3.json; default: the newest", metavar="NAME")]
Price = Annotated[
    str, Option("price of one GPU for one hour", metavar="AMOUNT", more="As in 2.49 or '2.49 EUR'.")
]
Json = Annotated[bool, Option("print JSON", "--json")]
Repository = Annotated[
    str,
    Option(
        "upload to Hugging Face",
        "--push-to-hub",
        metavar="OWNER/NAME",
        rich_help_panel=MORE_PANEL,
    ),
]
DryRun = Annotated[
    bool, Option("only list what would be uploaded", "--dry-run", rich_help_panel=MORE_PANEL)
]


def parse_numbers(text: str) -> frozenset[int]:
    """The numbers that a text such as `3,7-9` lists; none for an empty text."""
    return frozenset(parse_ranges(text) if text else ())
