"""The judge of the order of streams, on made-up histories."""

from __future__ import annotations

from collections import Counter

from tests.devices.stream_order import Event, History, faults, never_waited_for, work_between


def events(text: str) -> list[Event]:
    """`+a` issues the next call of communicator a, `-a` waits for the first that is not waited for, `>a` and `<a` are
    a message, its end waited for at once where it is received; `*` is work of the device.

    >>> [str(one) for one in events("+a -a >b")]
    ['issues all_reduce 0 of a', 'waits for all_reduce 0 of a', 'issues message 0 of b']
    """
    found, issued, waited, products = list[Event](), Counter[str](), Counter[str](), 0
    for word in text.split():
        sign, name = word[0], word[1:]
        kind = "message" if sign in "<>" else "all_reduce"
        if sign == "*":
            products += 1
        if sign in "+<>":
            found.append(Event("issue", (name, issued[name]), kind, products))
            issued[name] += 1
        if sign in "-<":
            found.append(Event("wait", (name, waited[name]), kind, products))
            waited[name] += 1
    return found


def ranks(*texts: str) -> History:
    return [events(text) for text in texts]


def test_what_follows_one_order_is_well() -> None:
    assert not faults(ranks("+a -a +b -b +a -a", "+a -a +b -b +a -a"))
    assert not faults(ranks("+a +b -a -b", "+a +b -b -a"), shared="all")
    assert not faults([])


def test_two_orders_with_waits_between_are_a_cycle() -> None:
    (found,) = faults(ranks("+a -a +b -b", "+b -b +a -a"))
    assert found.startswith("a cycle: ")
    assert "rank 0 issues all_reduce 0 of b" in found and "rank 1 issues all_reduce 0 of a" in found


def test_two_orders_without_waits_between_need_two_streams() -> None:
    crossed = ranks("+a +b -a -b", "+b +a -a -b")
    assert not faults(crossed)
    assert len(faults(crossed, shared="collectives")) == len(faults(crossed, shared="all")) == 1


def test_sums_of_another_thread_hang_behind_what_the_caller_waits_for() -> None:
    # the threads of a rank have one current stream: sums (s) come between the caller's calls (t) in another place
    assert not faults(ranks("+t -t +s -s +t -t", "+t -t +s -s +t -t"))
    (found,) = faults(ranks("+t -t +s -s +t -t", "+t -t +t -t +s -s"))
    assert "s" in found and "t" in found


def test_a_cycle_over_three_ranks() -> None:
    assert not faults(ranks("+a -a +c -c", "+a -a +b -b", "+b -b +c -c"))
    assert faults(ranks("+a -a +c -c", "+b -b +a -a", "+c -c +b -b"))


def test_calls_of_one_communicator_keep_their_order() -> None:
    # the second of a is behind the first, which waits for what comes after the second
    assert not faults(ranks("+a +a -a -a", "+a +a -a -a"))
    assert faults(ranks("+a +b -b +a", "+b +a +a -a -a -b", "")) == []
    assert faults(ranks("+a -a +b", "+b -b +a"))


def test_messages_wait_for_their_taker() -> None:
    # both may send first, on devices that run both messages at a time
    both = ranks(">ab <ba", ">ba <ab")
    assert not faults(both) and not faults(both, shared="collectives")
    assert faults(both, shared="all")
    # a collective that is waited for before a message that the other waits for
    assert faults(ranks("+a -a >ab", "<ab +a -a"))


def test_a_call_that_somebody_leaves_out() -> None:
    (found,) = faults(ranks("+a +a -a -a", "+a -a"))
    assert found == "all_reduce 1 of a is not issued by ranks [1]"
    assert faults(ranks("+a -a", "")) == ["all_reduce 0 of a is not issued by ranks []"]


def test_members_who_mean_different_things() -> None:
    one, other = Event("issue", ("a", 0), "all_gather"), Event("issue", ("a", 0), "all_to_all")
    assert faults([[one], [other]]) == ["call 0 of a is all_gather on rank 0 and all_to_all on rank 1"]


def test_a_part_of_a_history() -> None:
    whole = ranks("+a -a +b -b", "+a -a +b -b")
    assert not faults([each[1:] for each in whole])


def test_what_is_never_waited_for() -> None:
    assert never_waited_for(ranks("+a -a +a", "+a -a +a -a >b")) == ["rank 0 issues all_reduce 1 of a"]


def test_work_between_issue_and_wait() -> None:
    found = work_between(events("* +a * * +b -a * -b"))
    assert found == {("a", 0): ("all_reduce", 2), ("b", 0): ("all_reduce", 1)}
