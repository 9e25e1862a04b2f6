"""KindHouses: which kind lives where, and how many processes that takes."""

from __future__ import annotations

from actors.scheduler.kind_houses import KindHouses, most_replicas


def test_kinds_share_houses_when_there_are_many() -> None:
    """S-MR-142: one each while there are few; the next goes where fewest live; a house that is empty serves the next."""
    houses = KindHouses(max_houses=2, most_replicas=4)
    for kind in "abc":
        houses.move_in(kind, isolation=None, replicas=None)
    houses.move_in("a", isolation="process", replicas=3)  # it has a house
    assert houses.house_of("a") != houses.house_of("b")
    assert houses.house_of("c") == houses.house_of("a")
    home = houses.house_of("b")
    assert houses.move_out("b") is None
    assert houses.move_out("b") is None
    houses.move_in("d", isolation="shared", replicas=1)
    assert houses.house_of("d") == home


def test_house_of_an_isolated_kind_goes_with_it() -> None:
    """S-MR-142: however many there are."""
    houses = KindHouses(max_houses=1, most_replicas=4)
    for kind in "ab":
        houses.move_in(kind, isolation="process", replicas=2)
    home = houses.house_of("a")
    assert home != houses.house_of("b")
    assert houses.move_out("a") == home


def test_house_grows_when_its_kinds_say_nothing_and_much_is_in_flight() -> None:
    """S-MR-141: above 64; the most that any kind in it asks for is what it must have."""
    houses = KindHouses(max_houses=1, most_replicas=4)
    houses.move_in("a", isolation=None, replicas=2)
    assert houses.processes(houses.house_of("a"), in_flight=1000) == (2, 2)
    houses.move_in("b", isolation=None, replicas=None)
    home = houses.house_of("b")
    assert [houses.processes(home, in_flight=count) for count in (64, 65)] == [(2, 2), (2, 4)]


def test_most_replicas_are_the_clusters_cpus_and_at_most_eight() -> None:
    """S-MR-141: one where it has none."""
    assert [most_replicas(each) for each in ({"CPU": 2.0}, {"CPU": 64.0}, {"CPU": 0.0}, {})] == [2, 8, 1, 1]
