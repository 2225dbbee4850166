"""The instances: what they are, and when work may be given to them."""

import pytest

from moongate.router.fleet import Fleet, InstanceState
from moongate.router.model import (
    TEXT_SPACE,
    BlockSpace,
    Holder,
    InstanceFacts,
    InstanceId,
    InstanceSpec,
    ModelCard,
    RequestId,
    Role,
)

from .builders import MODEL, A, B, C, facts

R, S = RequestId("r"), RequestId("s")


def make_instance(described: InstanceFacts | None = None) -> InstanceState:
    return InstanceState(InstanceSpec(A), described)


def make_fleet(*instance_ids: InstanceId) -> Fleet:
    """Return a fleet of healthy, described instances, with 8 tokens a millisecond each."""
    fleet = Fleet(prefill_tokens_per_ms=8.0)
    for instance_id in instance_ids:
        instance = fleet.add(InstanceSpec(instance_id))
        instance.facts = facts()
        instance.is_healthy = True
    return fleet


def available(fleet: Fleet, now: float = 0.0, excluded: tuple[InstanceId, ...] = ()) -> list[str]:
    return [i.spec.id for i in fleet.available(MODEL, now, excluded)]


def get(fleet: Fleet, instance_id: InstanceId) -> InstanceState:
    instance = fleet.find(instance_id)
    assert instance is not None
    return instance


# --- what an instance is --------------------------------------------------------------------------


def test_an_instance_without_ranks_is_one_holder() -> None:
    instance = make_instance(facts())
    assert instance.holders == (Holder(A),)
    assert instance.holder_of(None) == instance.holder_of(0) == Holder(A)


def test_c48_ranks_are_the_global_ones() -> None:
    instance = make_instance(facts(ranks=(4, 5)))
    assert instance.holders == (Holder(A, 4), Holder(A, 5))
    assert instance.holder_of(4) == Holder(A, 4)
    assert instance.holder_of(None) == Holder(A, None)


def test_before_discovery_only_a_rank_above_0_is_taken_for_one() -> None:
    instance = make_instance()
    assert instance.holder_of(0) == Holder(A)
    assert instance.holder_of(3) == Holder(A, 3)


def test_an_adapter_has_a_space_of_its_own_and_an_alias_of_the_base_model_has_not() -> None:
    instance = make_instance(facts("m", "m-alias", adapters=("ad-1",)))
    assert instance.space("m-alias", 16) == instance.space("m", 16) == BlockSpace(16)
    assert instance.space("ad-1", 16) == BlockSpace(16, "ad-1")
    assert instance.card("ad-1") == ModelCard("ad-1", is_adapter=True)


def test_without_a_block_size_or_the_model_there_is_only_text() -> None:
    instance = make_instance(facts("m"))
    assert instance.space("m", None) == TEXT_SPACE
    assert instance.space("other", 16) == TEXT_SPACE
    assert make_instance().space("m", 16) == TEXT_SPACE


# --- health ---------------------------------------------------------------------------------------


def probe(instance: InstanceState, is_healthy: bool, is_gone: bool = False) -> bool:
    return instance.probed(is_healthy, is_gone, up_after=2, down_after=3)


def test_an_instance_goes_up_after_enough_good_checks_in_a_row() -> None:
    instance = make_instance()
    assert not probe(instance, True)
    assert not probe(instance, False)
    assert not probe(instance, True)
    assert probe(instance, True)
    assert instance.is_healthy


def test_an_instance_goes_down_after_enough_bad_checks_in_a_row() -> None:
    instance = make_instance()
    instance.is_healthy = True
    assert not probe(instance, False)
    assert not probe(instance, False)
    assert not probe(instance, True)
    assert not probe(instance, False)
    assert not probe(instance, False)
    assert probe(instance, False)
    assert not instance.is_healthy


def test_a_refused_connection_is_proof_enough() -> None:
    instance = make_instance()
    instance.is_healthy = True
    assert probe(instance, False, is_gone=True)
    assert not instance.is_healthy


# --- the fleet ------------------------------------------------------------------------------------


def test_instances_are_available_in_the_order_in_which_they_joined() -> None:
    assert available(make_fleet(B, A)) == [B, A]


def test_instances_that_are_down_or_excluded_or_prefill_only_are_not_available() -> None:
    fleet = make_fleet(A, B, C)
    get(fleet, A).is_healthy = False
    get(fleet, B).spec = InstanceSpec(B, Role.PREFILL)
    assert available(fleet) == [C]
    assert available(fleet, excluded=(C,)) == []


def test_instances_without_the_model_are_not_available() -> None:
    fleet = make_fleet(A, B)
    get(fleet, A).facts = facts("other")
    get(fleet, B).facts = None
    assert available(fleet) == []
    assert fleet.serving(MODEL) == []


def test_an_instance_whose_breaker_is_open_is_passed_over_while_there_is_another() -> None:
    fleet = make_fleet(A, B)
    get(fleet, A).breaker.failed(R, now=0.0)
    assert available(fleet, now=0.5) == [B]
    assert available(fleet, now=0.5, excluded=(B,)) == [A]
    assert available(fleet, now=1.0) == [A, B]


def test_an_id_joins_once() -> None:
    fleet = make_fleet(A)
    with pytest.raises(AssertionError):
        fleet.add(InstanceSpec(A))


def test_a_removed_instance_is_not_found() -> None:
    fleet = make_fleet(A, B)
    fleet.remove(A)
    assert fleet.find(A) is None
    assert [i.spec.id for i in fleet] == [B]


def test_the_models_of_all_instances_are_listed_once() -> None:
    fleet = make_fleet(A, B, C)
    get(fleet, B).facts = facts(MODEL, adapters=("ad-1",))
    get(fleet, C).facts = None
    assert fleet.model_cards() == {
        MODEL: ModelCard(MODEL),
        "ad-1": ModelCard("ad-1", is_adapter=True),
    }


def test_the_list_of_models_follows_discovery() -> None:
    fleet = make_fleet(A, B)
    assert list(fleet.model_cards()) == [MODEL]
    fleet.describe(get(fleet, A), facts("other"))
    assert list(fleet.model_cards()) == ["other", MODEL]
    assert fleet.model_cards() is fleet.model_cards()
    fleet.remove(B)
    assert list(fleet.model_cards()) == ["other"]


def test_the_prefill_rate_is_shared_and_scaled_by_weight() -> None:
    fleet = make_fleet(A, B)
    get(fleet, B).spec = InstanceSpec(B, weight=2.0)
    fleet.observe_prefill(get(fleet, B), tokens=1000, reused_tokens=0, elapsed_ms=100.0)
    assert fleet.tokens_per_ms == 5.0
