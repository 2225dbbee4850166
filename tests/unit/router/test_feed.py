"""One event source: order, duplicates, gaps, restarts, and how far it is trusted.

Batch 3 of a publisher's process "p" carries one event, `E[3]`; the feed's answers are compared as
they are.
"""

from moongate.router.events import BatchReceived, BlocksUnreadable
from moongate.router.feed import (
    DOUBT_PAUSE_S,
    PENDING_BATCHES_MAX,
    REMEMBERED_DIGESTS,
    REPLAY_PATIENCE_S,
    VERIFY_AFTER_SYNC_S,
    VERIFY_IDLE_S,
    Apply,
    Ask,
    Feed,
    FeedAction,
    Forget,
)
from moongate.router.model import Trust

from .builders import batch

E = [BlocksUnreadable(str(n)) for n in range(1000)]


def one(sequence: int, replay_id: int | None = None, process: str = "p") -> BatchReceived:
    return batch(sequence, E[sequence], replay_id=replay_id, process=process)


def apply(*sequences: int) -> list[FeedAction]:
    return [Apply((E[sequence],), None) for sequence in sequences]


def receive(feed: Feed, *batches: BatchReceived, now: float = 0.0) -> list[FeedAction]:
    """Let batches arrive and return all that they make the feed do."""
    return [action for received in batches for action in feed.received(received, now)]


def make_live(until: int = 0, has_replay: bool = True) -> Feed:
    """Return a feed that is synchronised and has applied batches 0 to `until` - 1."""
    feed = Feed(has_replay)
    feed.opened(0.0)
    if has_replay:
        feed.replay_ended(1, is_complete=True, now=0.0)
    receive(feed, *map(one, range(until)))
    return feed


def trust_of(feed: Feed) -> Trust:
    """Return the feed's trust as it is now, which a type checker takes for unchanging."""
    return feed.trust


# --- opening --------------------------------------------------------------------------------------


def test_an_opened_source_asks_for_all_that_was_published_before() -> None:
    assert Feed(has_replay=True).opened(0.0) == [Ask(from_sequence=0, replay_id=1)]


def test_an_opened_source_without_replay_asks_for_nothing() -> None:
    feed = Feed(has_replay=False)
    assert feed.opened(0.0) == []
    assert feed.next_wake() is None
    assert receive(feed, one(0)) == apply(0)
    assert feed.trust is Trust.EXACT


def test_live_batches_wait_for_the_replay_and_follow_it_in_order() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    assert receive(feed, one(2)) == []
    assert receive(feed, one(0, replay_id=1), one(1, replay_id=1)) == apply(0, 1)
    assert feed.replay_ended(1, is_complete=True, now=0.0) == apply(2)
    assert receive(feed, one(3)) == apply(3)
    assert feed.trust is Trust.EXACT


def test_a_batch_that_came_both_ways_is_applied_once() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    receive(feed, one(0), one(0, replay_id=1))
    assert feed.replay_ended(1, is_complete=True, now=0.0) == []
    assert (feed.counts.batches, feed.counts.duplicates, feed.counts.restarts) == (1, 1, 0)


def test_a_replay_answered_just_before_the_first_batch_is_asked_for_again() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    receive(feed, one(2))
    assert feed.replay_ended(1, is_complete=True, now=0.0) == [Ask(0, 2)]
    assert receive(feed, *(one(n, replay_id=2) for n in range(3))) == apply(0, 1, 2)
    assert feed.replay_ended(2, is_complete=True, now=0.0) == []
    assert feed.trust is Trust.EXACT
    assert feed.counts.lost_batches == 0


def test_a_second_empty_replay_settles_that_the_beginning_is_lost() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    receive(feed, one(2))
    feed.replay_ended(1, is_complete=True, now=0.0)
    assert feed.replay_ended(2, is_complete=True, now=0.0) == apply(2)
    assert feed.trust is Trust.DEGRADED
    assert feed.counts.lost_batches == 2


def test_a_replay_that_begins_later_than_asked_leaves_the_source_degraded() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    assert receive(feed, one(7, replay_id=1)) == apply(7)
    assert feed.trust is Trust.DEGRADED
    assert feed.counts.lost_batches == 7


def test_a_source_joined_in_its_middle_without_replay_is_degraded() -> None:
    feed = make_live(has_replay=False)
    assert receive(feed, one(5)) == apply(5)
    assert feed.trust is Trust.DEGRADED
    assert (feed.counts.lost_batches, feed.counts.gap_batches) == (5, 0)


# --- gaps -----------------------------------------------------------------------------------------


def test_c51_a_gap_is_replayed_once_and_applied_in_order() -> None:
    feed = make_live(until=10)
    assert receive(feed, one(15)) == [Ask(10, 2)]
    assert receive(feed, one(16)) == []
    replayed = [one(n, replay_id=2) for n in range(10, 16)]
    assert receive(feed, *replayed) == apply(10, 11, 12, 13, 14, 15)
    assert feed.replay_ended(2, is_complete=True, now=0.0) == apply(16)
    assert feed.counts.gap_batches == 5
    assert (feed.counts.replays, feed.counts.lost_batches) == (2, 0)  # one was to open
    assert feed.trust is Trust.EXACT


def test_c51_a_gap_without_replay_is_lost_and_the_source_degraded() -> None:
    feed = make_live(until=10, has_replay=False)
    assert receive(feed, one(15)) == apply(15)
    assert (feed.counts.gap_batches, feed.counts.lost_batches) == (5, 5)
    assert feed.trust is Trust.DEGRADED


def test_a_gap_that_the_replay_cannot_fill_is_not_asked_for_twice() -> None:
    feed = make_live(until=10)
    receive(feed, one(15))
    assert feed.replay_ended(2, is_complete=True, now=0.0) == apply(15)
    assert feed.counts.lost_batches == 5
    assert feed.trust is Trust.DEGRADED


def test_a_replay_cut_short_is_asked_for_from_where_it_ended() -> None:
    feed = make_live(until=10)
    receive(feed, one(15), one(10, replay_id=2))
    assert feed.replay_ended(2, is_complete=False, now=0.0) == [Ask(11, 3)]
    assert receive(feed, one(11, replay_id=3), one(12, replay_id=3)) == apply(11, 12)
    assert feed.trust is Trust.EXACT


def test_batches_dropped_in_the_middle_of_a_replay_are_asked_for_again() -> None:
    feed = make_live(until=10)
    receive(feed, one(15), one(10, replay_id=2))
    assert receive(feed, one(13, replay_id=2)) == [Ask(11, 3)]
    assert receive(feed, one(14, replay_id=2)) == []  # of the replay that was given up
    assert receive(feed, *(one(n, replay_id=3) for n in (11, 12, 13))) == apply(11, 12, 13)
    assert feed.counts.lost_batches == 0


def test_batches_missing_before_a_replays_first_are_lost() -> None:
    feed = make_live(until=10)
    receive(feed, one(15))
    assert receive(feed, one(13, replay_id=2)) == apply(13)
    assert feed.counts.lost_batches == 3
    assert feed.trust is Trust.DEGRADED


def test_an_unanswered_replay_is_doubted_until_one_is_answered() -> None:
    feed = make_live(until=10)
    feed.woke(VERIFY_IDLE_S)
    assert feed.replay_ended(2, is_complete=False, now=31.0) == []
    assert trust_of(feed) is Trust.DEGRADED
    feed.woke(31.0 + VERIFY_IDLE_S)
    receive(feed, one(9, replay_id=3))
    feed.replay_ended(3, is_complete=True, now=62.0)
    assert feed.trust is Trust.EXACT


def test_what_comes_after_a_lost_connection_waits_until_the_publisher_is_verified() -> None:
    feed = make_live(until=5)
    feed.connection_lost()
    assert feed.next_wake() is None
    # A new process may have come just as far; its batch must not pass for the next of the old one.
    assert receive(feed, one(5, process="q")) == []
    assert feed.reconnected(1.0) == [Ask(4, 2)]
    assert receive(feed, one(4, replay_id=2, process="q")) == [Forget(), Ask(0, 3)]
    replayed = [one(n, replay_id=3, process="q") for n in range(6)]
    assert receive(feed, *replayed) == apply(*range(6))
    assert feed.replay_ended(3, is_complete=True, now=1.0) == []
    assert feed.trust is Trust.EXACT


def test_a_connection_lost_for_a_moment_costs_nothing() -> None:
    feed = make_live(until=5)
    feed.connection_lost()
    feed.reconnected(1.0)
    assert receive(feed, one(4, replay_id=2), one(5, replay_id=2)) == apply(5)
    assert feed.replay_ended(2, is_complete=True, now=1.0) == []
    assert feed.epoch == 1


def test_a_replay_under_way_when_the_connection_is_lost_is_void() -> None:
    feed = make_live(until=5)
    receive(feed, one(9))
    feed.connection_lost()
    assert receive(feed, one(5, replay_id=2)) == []
    assert feed.replay_ended(2, is_complete=False, now=0.0) == []
    assert feed.reconnected(1.0) == [Ask(4, 3)]


def test_without_replay_a_lost_connection_is_nothing_until_it_is_back() -> None:
    feed = make_live(until=3, has_replay=False)
    feed.connection_lost()
    assert receive(feed, one(3)) == apply(3)


def test_a_replay_not_answered_in_time_is_given_up() -> None:
    feed = make_live(until=10)
    receive(feed, one(15), now=100.0)
    assert feed.next_wake() == 100.0 + REPLAY_PATIENCE_S
    assert feed.woke(100.0 + REPLAY_PATIENCE_S - 0.1) == []
    assert feed.woke(100.0 + REPLAY_PATIENCE_S) == apply(15)
    assert feed.trust is Trust.DEGRADED


def test_what_belongs_to_a_replay_that_was_given_up_is_ignored() -> None:
    feed = make_live(until=10)
    receive(feed, one(15))
    feed.woke(REPLAY_PATIENCE_S)
    assert receive(feed, one(10, replay_id=2)) == []
    assert feed.replay_ended(2, is_complete=True, now=11.0) == []
    receive(feed, one(20))  # asks for replay 3
    assert receive(feed, one(16, replay_id=2)) == []
    assert feed.replay_ended(2, is_complete=True, now=11.0) == []
    assert receive(feed, one(16, replay_id=3)) == apply(16)


def test_a_batch_replayed_twice_is_applied_once() -> None:
    feed = make_live(until=10)
    receive(feed, one(12))
    assert receive(feed, one(10, replay_id=2), one(10, replay_id=2)) == apply(10)
    assert feed.expected == 11


def test_c54_a_batch_that_the_publisher_has_forgotten_is_asked_about_once() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    receive(feed, one(1), one(3, replay_id=1), one(4, replay_id=1))
    assert feed.replay_ended(1, is_complete=True, now=0.0) == [Forget(), Ask(0, 2)]
    assert receive(feed, one(3, replay_id=2), one(4, replay_id=2)) == apply(3, 4)
    assert feed.replay_ended(2, is_complete=True, now=0.0) == []
    assert feed.trust is Trust.DEGRADED


def test_two_gaps_kept_back_in_one_replay_are_repaired_one_after_the_other() -> None:
    feed = make_live(until=1)
    assert receive(feed, one(2), one(4), one(5)) == [Ask(1, 2)]
    assert receive(feed, one(1, replay_id=2)) == apply(1)
    assert feed.replay_ended(2, is_complete=True, now=0.0) == [*apply(2), Ask(3, 3)]
    assert receive(feed, one(3, replay_id=3)) == apply(3)
    assert feed.replay_ended(3, is_complete=True, now=0.0) == apply(4, 5)
    assert feed.trust is Trust.EXACT


def test_past_the_limit_of_batches_kept_back_the_replay_is_given_up() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    kept_back = [batch(1 + n) for n in range(PENDING_BATCHES_MAX)]
    assert receive(feed, *kept_back) == []
    assert len(receive(feed, batch(1 + PENDING_BATCHES_MAX))) == PENDING_BATCHES_MAX + 1
    assert feed.counts.lost_batches == 1
    assert feed.trust is Trust.DEGRADED


# --- duplicates and restarts ----------------------------------------------------------------------


def test_a_batch_received_again_is_a_duplicate() -> None:
    feed = make_live(until=3)
    assert receive(feed, one(1)) == []
    assert (feed.counts.duplicates, feed.epoch) == (1, 1)


def test_c54_a_lower_sequence_with_other_bytes_is_a_restart() -> None:
    feed = make_live(until=900)
    again = [one(n, process="q") for n in range(3)]
    assert receive(feed, *again) == [Forget(), *apply(0, 1, 2)]
    assert (feed.epoch, feed.expected, feed.counts.restarts) == (2, 3, 1)
    assert feed.counts.replays == 1  # the one at the opening: no replay loop
    assert feed.trust is Trust.EXACT


def test_c54_after_a_restart_old_bytes_are_no_duplicates() -> None:
    feed = make_live(until=3)
    receive(feed, one(0, process="q"))
    assert receive(feed, one(1)) == apply(1)


def test_a_restart_first_seen_in_its_middle_is_replayed_from_its_beginning() -> None:
    feed = make_live(until=900)
    assert receive(feed, one(1, process="q")) == [Forget(), Ask(0, 2)]
    replayed = [one(n, replay_id=2, process="q") for n in range(2)]
    assert receive(feed, *replayed) == apply(0, 1)


def test_a_restart_ends_the_distrust() -> None:
    feed = make_live(until=10, has_replay=False)
    receive(feed, one(15))
    receive(feed, one(0, process="q"))
    assert feed.trust is Trust.EXACT


def test_a_duplicate_older_than_what_is_remembered_is_taken_for_a_restart() -> None:
    feed = make_live(until=REMEMBERED_DIGESTS + 1)
    assert receive(feed, one(1)) == []
    assert receive(feed, one(0)) == [Forget(), *apply(0)]


# --- reconnecting ---------------------------------------------------------------------------------


def test_a_reconnected_source_is_asked_for_the_batch_applied_last() -> None:
    feed = make_live(until=5)
    assert feed.reconnected(0.0) == [Ask(4, 2)]
    assert receive(feed, one(4, replay_id=2), one(5, replay_id=2)) == apply(5)
    assert feed.replay_ended(2, is_complete=True, now=0.0) == []
    assert (feed.epoch, feed.trust) == (1, Trust.EXACT)


def test_a_restart_behind_a_question_without_an_answer_is_found_by_the_next_one() -> None:
    """What came after the question may be another process's, whose batches go on from ours by chance."""
    feed = make_live(until=1)
    assert feed.reconnected(0.0) == [Ask(0, 2)]
    assert feed.replay_ended(2, is_complete=False, now=0.0) == []
    assert receive(feed, one(1, process="q")) == apply(1)
    assert feed.trust is Trust.DEGRADED

    due = feed.next_wake()
    assert due is not None
    assert feed.woke(due) == [Ask(0, 3)], "the last batch that was certainly the publisher's"
    answered = receive(feed, one(0, 3, "q"), one(1, 3, "q"), now=due)
    assert answered == [Forget(), *apply(0, 1)]
    assert feed.replay_ended(3, is_complete=True, now=due) == []
    assert (feed.epoch, feed.trust) == (2, Trust.EXACT)


def test_batches_behind_a_question_without_an_answer_stay_if_it_is_the_same_publisher() -> None:
    feed = make_live(until=1)
    feed.reconnected(0.0)
    feed.replay_ended(2, is_complete=False, now=0.0)
    receive(feed, one(1), one(2))
    due = feed.next_wake()
    assert due is not None
    assert feed.woke(due) == [Ask(0, 3)]
    assert receive(feed, *(one(n, replay_id=3) for n in range(3)), now=due) == []
    assert feed.replay_ended(3, is_complete=True, now=due) == []
    assert (feed.epoch, feed.trust) == (1, Trust.EXACT)
    later = feed.next_wake()
    assert later is not None
    assert feed.woke(later) == [Ask(2, 4)]


def test_a_reconnected_source_of_which_nothing_was_applied_is_asked_for_all() -> None:
    feed = make_live()
    assert feed.reconnected(0.0) == [Ask(0, 2)]
    assert receive(feed, one(0, replay_id=2)) == apply(0)


def test_another_publisher_behind_the_same_address_is_read_from_its_beginning() -> None:
    feed = make_live(until=5)
    feed.reconnected(0.0)
    assert receive(feed, one(4, replay_id=2, process="q")) == [Forget(), Ask(0, 3)]
    replayed = [one(n, replay_id=3, process="q") for n in range(5)]
    assert receive(feed, *replayed) == apply(0, 1, 2, 3, 4)


def test_another_publisher_that_begins_where_the_feed_stood_needs_no_second_replay() -> None:
    feed = make_live(until=1)
    feed.reconnected(0.0)
    assert receive(feed, one(0, replay_id=2, process="q")) == [Forget(), *apply(0)]


def test_a_publisher_that_lacks_our_last_batch_is_another() -> None:
    feed = make_live(until=5)
    feed.reconnected(0.0)
    assert receive(feed, one(0, process="q")) == []
    assert feed.replay_ended(2, is_complete=True, now=0.0) == [Forget(), *apply(0)]
    assert feed.trust is Trust.EXACT


def test_a_publisher_that_has_forgotten_our_place_is_degraded() -> None:
    feed = make_live(until=5)
    feed.reconnected(0.0)
    assert receive(feed, one(50, replay_id=2)) == [Forget(), Ask(0, 3)]
    assert receive(feed, one(50, replay_id=3)) == apply(50)
    assert feed.trust is Trust.DEGRADED


def test_what_was_kept_back_before_a_reconnect_may_be_of_the_old_publisher() -> None:
    feed = make_live(until=5)
    receive(feed, one(9))
    assert feed.reconnected(0.0) == [Ask(4, 3)]
    assert feed.replay_ended(3, is_complete=True, now=0.0) == [Forget()]


def test_without_replay_a_reconnected_source_begins_anew_and_degraded() -> None:
    feed = make_live(until=5, has_replay=False)
    assert feed.reconnected(0.0) == [Forget()]
    assert trust_of(feed) is Trust.APPROXIMATE
    assert receive(feed, one(5)) == apply(5)
    assert trust_of(feed) is Trust.DEGRADED


# --- silence --------------------------------------------------------------------------------------


def test_a_new_source_is_looked_at_once_more_soon_after_its_first_replay() -> None:
    feed = Feed(has_replay=True)
    feed.opened(0.0)
    feed.replay_ended(1, is_complete=True, now=5.0)
    assert feed.next_wake() == 5.0 + VERIFY_AFTER_SYNC_S
    assert feed.woke(5.0 + VERIFY_AFTER_SYNC_S) == [Ask(0, 2)]


def test_a_silent_source_is_asked_whether_anything_was_missed() -> None:
    feed = make_live(until=1)
    receive(feed, one(1), now=50.0)
    assert feed.next_wake() == 50.0 + VERIFY_IDLE_S
    assert feed.woke(50.0 + VERIFY_IDLE_S) == [Ask(1, 2)]
    replayed = [one(1, replay_id=2), one(2, replay_id=2)]
    assert receive(feed, *replayed, now=80.5) == apply(2)
    feed.replay_ended(2, is_complete=True, now=81.0)
    assert feed.next_wake() == 81.0 + VERIFY_IDLE_S


def test_a_silent_source_without_replay_is_left_alone() -> None:
    feed = make_live(until=1, has_replay=False)
    assert feed.next_wake() is None
    assert feed.woke(1000.0) == []


# --- trust ----------------------------------------------------------------------------------------


def test_a_cache_that_is_known_again_ends_the_distrust() -> None:
    feed = make_live(until=1, has_replay=False)
    receive(feed, one(3))
    feed.believe()
    assert feed.trust is Trust.EXACT


def test_distrust_lasts_until_the_cache_is_known_again() -> None:
    feed = make_live()
    assert trust_of(feed) is Trust.EXACT
    feed.distrust()
    feed.distrust()
    assert trust_of(feed) is Trust.DEGRADED
    feed.believe()
    assert trust_of(feed) is Trust.EXACT


# --- doubts ---------------------------------------------------------------------------------------


def test_c57_a_doubt_lets_a_source_be_verified_at_once_and_not_too_often() -> None:
    feed = make_live(until=2)
    assert feed.doubted(1.0) == [Ask(from_sequence=1, replay_id=2)]
    assert feed.doubted(1.0) == [], "it is being verified"
    assert receive(feed, one(1, replay_id=2), one(2, replay_id=2)) == apply(2)
    feed.replay_ended(2, is_complete=True, now=1.0)
    assert feed.doubted(0.9 + DOUBT_PAUSE_S) == []
    assert feed.doubted(1.0 + DOUBT_PAUSE_S) == [Ask(from_sequence=2, replay_id=3)]


def test_c57_without_replay_a_doubt_changes_nothing() -> None:
    feed = make_live(until=2, has_replay=False)
    assert feed.doubted(1.0) == []
    assert trust_of(feed) is Trust.EXACT
