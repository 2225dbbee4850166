"""Instances that exist in a core only, for measurements without sockets."""

from __future__ import annotations

from moongate.router import (
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    RouterCore,
    SourceId,
    SourceOpened,
)


def add_instance(core: RouterCore, instance_id: InstanceId, facts: InstanceFacts) -> None:
    """Add a healthy instance at time 0 whose source of events is open and has said nothing yet."""
    core.handle(InstanceAdded(InstanceSpec(instance_id)), 0.0)
    core.handle(InstanceDescribed(instance_id, facts), 0.0)
    core.handle(InstanceProbed(instance_id, is_healthy=True), 0.0)
    core.handle(SourceOpened(SourceId(instance_id), has_replay=False), 0.0)
