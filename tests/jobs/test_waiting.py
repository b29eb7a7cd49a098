"""Who is given which shard: each once, neighbours to the same, without a search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from encast.jobs.waiting import Waiting


def test_one_has_all_in_their_order_and_another_takes_the_second_half() -> None:
    waiting: Waiting[str] = Waiting([*range(8), 10, 11])
    assert [waiting.take("a") for _ in range(2)] == [0, 1]
    assert [waiting.take("b") for _ in range(2)] == [10, 11]  # what nobody has
    assert waiting.take("b") == 5
    assert [waiting.take("a") for _ in range(3)] == [2, 3, 4]
    assert [waiting.take(who) for who in "aabb"] == [7, 6, None, None]


def test_what_failed_comes_last_and_elsewhere() -> None:
    waiting: Waiting[str] = Waiting(range(3))
    assert waiting.take("a", "A", {"B"}) == 0
    waiting.again(0, ["A"])
    assert [waiting.take("a", "A", {"B"}) for _ in range(3)] == [1, 2, None]
    assert (len(waiting), waiting.take("b", "B", {"A"})) == (1, 0)
    waiting.again(0, ["A", "B"])
    assert waiting.take("a", "A", {"B"}) == 0  # it failed on all: any may try it


def test_who_leaves_gives_back_what_he_has_not_begun() -> None:
    waiting: Waiting[str] = Waiting(range(4))
    assert waiting.take("a") == 0
    waiting.leave("a")
    waiting.put_back([0])
    assert len(waiting) == 4
    assert [waiting.take("b") for _ in range(5)] == [0, 1, 2, 3, None]


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "done", "fail", "lose", "leave"])))


@given(st.sets(st.integers(0, 30)), STEPS)
def test_each_is_given_to_one_at_a_time_until_it_is_done(numbers: set[int], steps: list[tuple[str, str]]) -> None:
    waiting: Waiting[str] = Waiting(sorted(numbers))
    taken: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    done: set[int] = set()
    for who, step in [*steps, *[("a", "take"), ("a", "done")] * len(numbers)]:
        if step == "take":
            number = waiting.take(who, who, set())
            if number is not None:
                assert number in numbers - done
                assert all(number not in of for of in taken.values())
                taken[who].append(number)
        elif step == "leave":
            waiting.leave(who)
        elif taken[who]:
            number = taken[who].pop()
            if step == "done":
                done.add(number)
            elif step == "fail":
                waiting.again(number, [who])
            else:
                waiting.put_back([number])
        held = sum(map(len, taken.values()))
        assert len(waiting) + held + len(done) == len(numbers)
    assert len(waiting) == 0
