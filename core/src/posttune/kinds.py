"""The eight kinds of plugin: entry-point group, hook prefix, specification."""

from __future__ import annotations

from dataclasses import dataclass

from posttune import hookspecs


@dataclass(frozen=True)
class Kind:
    """One kind of plugin."""

    name: str
    spec: type
    summary: str

    @property
    def group(self) -> str:
        """The entry-point group, ``posttune.<kind>``."""
        return f"posttune.{self.name}"

    @property
    def prefix(self) -> str:
        """What every hook of the kind begins with."""
        return f"{self.name}_"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("rollout_backend", hookspecs.RolloutBackendSpec, "generates completions"),
        Kind("advantage_estimator", hookspecs.AdvantageEstimatorSpec, "turns rewards into advantages"),
        Kind("policy_loss", hookspecs.PolicyLossSpec, "loss of each response token"),
        Kind("reward", hookspecs.RewardSpec, "scores samples"),
        Kind("reward_manager", hookspecs.RewardManagerSpec, "combines the scores of a sample"),
        Kind("data_converter", hookspecs.DataConverterSpec, "reads the rows of a data format"),
        Kind("checkpoint_exporter", hookspecs.CheckpointExporterSpec, "writes a model for others to load"),
        Kind("observer", hookspecs.ObserverSpec, "sees metrics, samples and checkpoints"),
    )
}

COMMAND_GROUP = "posttune.command"
