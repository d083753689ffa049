"""Choices against exhaustive search, and what a time limit and impossible targets give."""

import math
import random
import re
from itertools import product

import pytest

pytest.importorskip("scipy", reason="extra prune")

from outsize.base.errors import OutsizeError
from outsize.methods.bypass.choose import Limit, NoChoiceFound, Option, TargetInfeasible, choose, choose_uniform

COSTS = ("params", "memory", "latency")


def options_of(chance, groups=4, variants=4, whole_numbers=False):
    draw = (lambda: float(chance.randint(0, 5))) if whole_numbers else chance.random
    return [
        Option(f"{group:02}", f"v{variant}", draw(), {cost: draw() for cost in COSTS})
        for group in range(groups)
        for variant in range(chance.randint(2, variants))
    ]


def all_choices(options):
    groups = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    return list(product(*groups.values()))


def total(combination, cost):
    return math.fsum(option.costs[cost] for option in combination)


def allowed(combination, limits):
    return all(limit.allows(total(combination, limit.cost)) for limit in limits)


def limits_of(chance, combinations, number):
    """Limits around the sums of a random combination, both sides at times, often just reached or just missed."""
    one, other = chance.choice(combinations), chance.choice(combinations)
    limits = []
    for index, cost in enumerate(COSTS[:number]):
        value = total(one if index == 0 else other, cost)
        wide = chance.choice([0.0, 0.0, 0.1])
        low = value - chance.choice([0.0, 0.3]) if chance.random() < 0.4 else -math.inf
        limits.append(Limit(cost, value + wide, low))
    return limits


@pytest.mark.parametrize("seed", range(200))
def test_equals_exhaustive_search(seed):
    chance = random.Random(seed)
    options = options_of(chance, groups=chance.randint(1, 5), whole_numbers=seed % 4 == 0)
    combinations = all_choices(options)
    limits = limits_of(chance, combinations, 2 + seed % 2)
    possible = [each for each in combinations if allowed(each, limits)]
    chance.shuffle(options)
    if not possible:
        with pytest.raises(TargetInfeasible) as error:
            choose(options, limits)
        for limit in limits:
            others = [each for each in limits if each is not limit]
            sums = [total(each, limit.cost) for each in combinations if allowed(each, others)]
            above = [value for value in sums if value >= limit.minimum]
            below = [value for value in sums if value <= limit.maximum]
            if above:
                assert error.value.nearest[limit.cost] == min(above)
            elif below and math.isfinite(limit.minimum):
                assert error.value.nearest[limit.cost] == max(below)
            else:
                assert limit.cost not in error.value.nearest
        return
    found = choose(options, limits)
    best = min(math.fsum(option.score for option in each) for each in possible)
    assert found.score == best
    assert found.proven and found.gap == 0
    chosen = [option for option in options if found.names[option.group] == option.name]
    assert allowed(chosen, limits)
    assert {cost: total(chosen, cost) for cost in COSTS} == dict(found.costs)


def test_random_cases_contain_infeasible_ones():
    kinds = []
    for seed in range(200):
        chance = random.Random(seed)
        combinations = all_choices(options_of(chance, groups=chance.randint(1, 5), whole_numbers=seed % 4 == 0))
        limits = limits_of(chance, combinations, 2 + seed % 2)
        kinds.append(any(allowed(each, limits) for each in combinations))
    assert 20 <= kinds.count(False) <= 150


def test_alike_options_by_name_and_any_order():
    options = [Option("a", name, 1.0, {"params": 2.0}) for name in ("z", "m", "b")]
    options += [Option("b", name, score, {"params": 2.0}) for name, score in (("x", 0.5), ("c", 0.5))]
    limits = [Limit("params", 4.0)]
    assert choose(options, limits).names == {"a": "b", "b": "c"}
    chance = random.Random(0)
    many = options_of(chance, groups=12, whole_numbers=True)
    bound = [Limit("params", 25.0)]
    first = choose(many, bound)
    for _ in range(5):
        chance.shuffle(many)
        assert choose(many, bound) == first


def test_limit_that_is_reached_exactly():
    """Sums in the order of 1e10: a solver's tolerance alone would allow more than the limit."""
    options = [
        Option(f"{group}", f"v{variant}", float(-variant), {"params": 1e9 + variant})
        for group in range(8)
        for variant in range(4)
    ]
    for extra in (0, 7, 24):
        found = choose(options, [Limit("params", 8e9 + extra)])
        assert found.costs["params"] == 8e9 + extra and found.score == -extra and found.proven


def big_problem(groups=160, variants=7):
    """80 layers of 2 sub-blocks as in a model: a smaller variant has a worse score."""
    chance = random.Random(1)
    options = []
    for group in range(groups):
        weight = chance.lognormvariate(0, 1)
        for variant in range(variants):
            share = 1 - variant / variants
            options.append(
                Option(
                    f"{group:03}",
                    f"v{variant}",
                    weight * (1 - share) ** 2 * chance.uniform(0.7, 1.3),
                    {
                        "params": share * (3 if group % 2 else 1),
                        "memory": share * chance.uniform(0.9, 1.1),
                        "latency": chance.uniform(0.05, 0.1) + share * chance.uniform(0.8, 1.2),
                    },
                )
            )
    full = {cost: math.fsum(o.costs[cost] for o in options if o.name == "v0") for cost in COSTS}
    return options, [Limit(cost, 0.7 * full[cost]) for cost in COSTS]


def test_eighty_layers_three_limits():
    options, limits = big_problem()
    found = choose(options, limits)
    assert found.proven
    assert all(limit.allows(found.costs[limit.cost]) for limit in limits)


def test_time_limit_gives_a_labeled_answer():
    """D50: at a time limit the best answer, with its gap, instead of none."""
    options, limits = big_problem()
    found = choose(options, limits, time_limit=0.01)
    assert all(limit.allows(found.costs[limit.cost]) for limit in limits)
    assert not found.proven and found.gap > 0
    assert found.score < sum(max(o.score for o in options if o.group == g) for g in {o.group for o in options})
    with pytest.raises(NoChoiceFound, match=r"0\.01 s"):
        # Both bounds of three costs, met by hardly any choice.
        tight = [Limit(limit.cost, limit.maximum, limit.maximum - 1e-9) for limit in limits]
        choose(options, tight, time_limit=0.01)


def test_infeasible_names_the_nearest_target():
    options = [Option("a", f"v{n}", -n, {"params": float(n), "latency": 10.0 - n}) for n in range(1, 4)]
    with pytest.raises(TargetInfeasible, match=re.escape("params ≤ 0.5. Keep the other limits and change one to")) as e:
        choose(options, [Limit("params", 0.5)])
    assert e.value.nearest == {"params": 1.0}
    with pytest.raises(TargetInfeasible, match=r"No single limit is enough\. Reachable alone: params from 1 to 3") as e:
        choose(options, [Limit("params", 0.5), Limit("latency", 6.5)])
    with pytest.raises(TargetInfeasible, match="params 2 or latency 9") as e:
        choose(options, [Limit("params", 1.0), Limit("latency", 8.0)])


@pytest.mark.parametrize("seed", range(10))
def test_uniform_equals_exhaustive_search(seed):
    chance = random.Random(seed)
    layers = {f"{layer}": (f"{layer}.attention", f"{layer}.ffn") for layer in range(4)}
    options = [
        Option(group, name, 0.0 if name == "full" else chance.random(), {"params": chance.random() * (name != "skip")})
        for groups in layers.values()
        for group in groups
        for name in ("full", "half", "skip")
    ]
    by_key = {(option.group, option.name): option for option in options}
    limit = Limit("params", 2.0)
    found = choose_uniform(options, [limit], layers)
    scores = []
    for attention, ffn in product(("full", "half"), repeat=2):
        for kept in product((True, False), repeat=4):
            parts = [
                by_key[group, name if keep else "skip"]
                for keep, groups in zip(kept, layers.values(), strict=True)
                for group, name in zip(groups, (attention, ffn), strict=True)
            ]
            if limit.allows(total(parts, "params")):
                scores.append(math.fsum(part.score for part in parts))
    assert found.score == pytest.approx(min(scores), abs=1e-12)
    kinds = {tuple(found.names[group] for group in groups) for groups in layers.values()} - {("skip", "skip")}
    assert len(kinds) <= 1


def test_the_limit_that_a_message_names_is_enough():
    for large in (123456789.0, 0.123456789012):
        options = [Option("a", "v", 0.0, {"params": large}), Option("b", "v", 0.0, {"params": large})]
        with pytest.raises(TargetInfeasible) as e:
            choose(options, [Limit("params", large / 4)])
        assert choose(options, [Limit("params", float(re.search(r"params (\S+)\.$", str(e.value))[1]))])


def uniform_case(layers=4):
    chance = random.Random(0)
    groups = {f"{layer:02}": (f"{layer:02}.attention", f"{layer:02}.ffn") for layer in range(layers)}
    sizes = {"full": 1.0, "half": 0.5, "skip": 0.0}
    options = [
        Option(group, name, 0.0 if name == "full" else chance.random(), {"params": size, "latency": 2 * size + 1})
        for pair in groups.values()
        for group in pair
        for name, size in sizes.items()
    ]
    return options, groups


def test_uniform_names_the_nearest_target_of_all_its_choices():
    options, groups = uniform_case()
    with pytest.raises(TargetInfeasible) as error:
        choose_uniform(options, [Limit("params", 0.2, 0.1)], groups)
    assert error.value.nearest == {"params": 1.0}  # one layer with both halves
    assert error.value.alone == {"params": (0.0, 8.0)}
    shifted = error.value.plus({"params": 10.0})
    assert shifted.nearest == {"params": 11.0} and "params ≥ 10.1 and ≤ 10.2" in str(shifted)


def test_uniform_is_proven_only_if_all_of_its_choices_are():
    """What was not searched to its end may be better."""
    chance = random.Random(0)
    layers = {f"{layer:03}": (f"{layer:03}.attention", f"{layer:03}.ffn") for layer in range(200)}
    options = [
        Option(group, name, chance.random() * (name != "full"), {c: chance.random() * (name != "skip") for c in COSTS})
        for pair in layers.values()
        for group in pair
        for name in ("full", "half", "third", "skip")
    ]
    limits = [Limit(cost, 70.0) for cost in COSTS]
    found = choose_uniform(options, limits, layers, time_limit=1e-9)
    assert not found.proven and all(limit.allows(found.costs[limit.cost]) for limit in limits)
    assert issubclass(TargetInfeasible, OutsizeError) and issubclass(NoChoiceFound, OutsizeError)  # no traceback


def test_options_without_finite_numbers_are_refused():
    with pytest.raises(ValueError, match="a, variant v: the score or a cost is not finite"):
        choose([Option("a", "v", math.nan, {"params": 1.0})], [Limit("params", 1.0)])
