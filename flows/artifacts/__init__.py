"""What a run shows in Prefect's pages: progress, tables, pictures, links to reports."""

from flows.artifacts.build_summary import build_summary
from flows.artifacts.facts_table import facts_table
from flows.artifacts.progress_artifact import growing_artifact, progress_artifact
from flows.artifacts.publishing import artifact_key
from flows.artifacts.result_table import link_to, markdown_file, result_table
from flows.artifacts.series_sheet import series_sheet
from flows.artifacts.training_artifact import training_artifact

__all__ = [
    "artifact_key",
    "build_summary",
    "facts_table",
    "growing_artifact",
    "link_to",
    "markdown_file",
    "progress_artifact",
    "result_table",
    "series_sheet",
    "training_artifact",
]
