"""What is exported of autoscaling."""

from prometheus_client import CollectorRegistry, generate_latest

from warmroot.cluster.scaling import Decision
from warmroot.cluster.scaling_status import ScalingStatus, first_status
from warmroot.router.scaling_metrics import ScalingCollector
from warmroot.router.several_models import SeveralModels


def decision(before: int, target: int, signal: str) -> Decision:
    return Decision(at=1.0, before=before, target=target, ready=before, needed=2.5, signal=signal, reasons=("why",))


class Model:
    def __init__(self, *statuses: ScalingStatus) -> None:
        self.statuses = list(statuses)

    def autoscalers(self) -> list[ScalingStatus]:
        return self.statuses


def test_numbers_and_changes_by_signal():
    status = first_status("m", decision(1, 2, "arriving"))
    for before, target, signal in ((2, 3, "kv"), (3, 4, "kv"), (4, 3, "idle"), (3, 3, "arriving")):
        status = status.then(decision(before, target, signal))
    registry = CollectorRegistry()
    registry.register(ScalingCollector(SeveralModels([Model(status), Model()])))  # the second one's size is fixed
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    name = "warmroot:autoscaling_"
    assert [line for line in lines if not line.endswith(" 0.0")] == [
        f'{name}target_replicas{{model_name="m"}} 3.0',
        f'{name}ready_replicas{{model_name="m"}} 3.0',
        f'{name}needed_replicas{{model_name="m",signal="arriving"}} 2.5',
        f'{name}decisions_total{{direction="up",model_name="m",signal="arriving"}} 1.0',
        f'{name}decisions_total{{direction="up",model_name="m",signal="kv"}} 2.0',
        f'{name}decisions_total{{direction="down",model_name="m",signal="idle"}} 1.0',
    ]
