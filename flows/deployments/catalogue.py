"""Which flows can be deployed, and how a first run of each is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deployable:
    """A flow by the path of its function: workers and images have semix installed.

    Attributes:
        example: parameters of a first run; whole paths, for a worker runs a flow in a new folder.
    """

    kind: str
    example: Mapping[str, str] = field(default_factory=dict)

    @property
    def flow_name(self) -> str:
        return f"semix-{self.kind}"

    @property
    def entrypoint(self) -> str:
        return f"flows.{self.kind}_flow.{self.kind}_flow"


FLOWS = {
    flow.kind: flow
    for flow in (
        Deployable("build", {"config": "/data/build.yaml", "out": "/data/mixed"}),
        Deployable("relabel", {"url": "/data/mixed", "overrides": '["annotation.scale=4"]'}),
        Deployable("train", {"config": "/data/csm.yaml", "out": "/data/runs/csm"}),
        Deployable("evaluate", {"run": "/data/runs/csm"}),
        Deployable("study", {"config": "/data/study.yaml", "out": "/data/study"}),
        Deployable("quickstart", {"out": "/data/quickstart"}),
    )
}
