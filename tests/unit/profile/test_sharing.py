"""Which calls a profiling run measures where calls share gradients."""

from outsize.profile.sharing import SharedGradients, calls_to_run


def test_a_place_among_the_users_of_a_weight() -> None:
    gradients = SharedGradients([(1, 4, 7), (2,), (4, 7)])
    assert gradients.position(1) == ((False, True),)
    assert gradients.position(4) == ((True, True), (False, True))
    assert gradients.position(7) == ((True, False), (True, False))
    assert gradients.position(2) == gradients.position(0) == ()


def test_a_weight_has_its_first_and_last_user_run_if_any_does() -> None:
    gradients = SharedGradients([(1, 4, 7), (2, 5, 8), (3, 9)])
    assert gradients.complete([4]) == {1, 4, 7}
    assert gradients.complete([3]) == {3, 9}
    assert gradients.complete([0]) == {0}
    assert SharedGradients([(-1, 2, 5)]).complete([2]) == {2, 5}, "a tensor that a region made"


def test_partners_of_partners_run_too() -> None:
    assert SharedGradients([(1, 6), (2, 6), (2, 5)]).complete([1]) == {1, 2, 5, 6}


def test_two_of_every_kind_run_and_their_partners() -> None:
    """Weights tied in reverse order: the first users of one kind are not the partners of the first last users."""
    gradients = SharedGradients([(1, 6), (2, 5), (3, 4)])
    keys = {call: "first" if call < 4 else "last" for call in range(1, 7)}
    assert calls_to_run(keys, [], gradients) == {1, 2, 3, 4, 5, 6}
    assert calls_to_run({call: "alike" for call in range(1, 7)}, [6], SharedGradients([])) == {1, 2, 6}
