"""`make osft-demo`, a few steps of it: what it compares, and that it compares at equal loss."""

import io
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import outsize
from examples import osft
from examples.osft import LEVEL, METHODS, NEW, OLD, Dictionaries, Method, Outcome, Point, Run, Scale
from examples.osft_picture import HEIGHT, WIDTH, Panel, Series, picture
from outsize.progress import Bar

SPLIT = [method for method in METHODS if method.osft is not None and method.osft.unfreeze_rank_ratio != 1]
FULL = METHODS[0]
SMALL = Scale(seeds=1, old_steps=200, max_steps=60, rates=(3e-3, 1e-3, 1e-7), rows=16)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_of(*points: tuple[float, float, float], method: str = "full", rate: float = 1.0, seed: int = 0) -> Run:
    return Run(method, rate, seed, [Point(*point) for point in points])


def test_the_demo_compares_at_equal_loss_on_the_new_task(tmp_path: Path) -> None:
    methods, screen = [FULL, SPLIT[-2]], io.StringIO()
    outcome = osft.main(SMALL, to=tmp_path / "osft.svg", methods=methods, console=Console(file=screen, width=104))
    assert len({run.path[0] for run in outcome.runs}) == 1, "all runs of a seed start from the same weights"
    for run in outcome.runs:
        *way, end = run.path
        assert all(point.new > LEVEL for point in way)
        assert (run.at_level is None) == (end.new > LEVEL) == (end.step == SMALL.max_steps)
        assert run.at_level is None or run.at_level.new == LEVEL
    for method in methods:
        rates = [run.rate for run in outcome.runs if run.method == method.name]
        assert rates[-1] not in outcome.reached(method.name), "a method ends at the first rate that is too slow"
        (best,) = outcome.best(method.name)
        assert best.at_level.old == min(runs[0].at_level.old for runs in outcome.reached(method.name).values())
        # Learned from about log(24), and forgotten since.
        assert best.path[0].old < 1 < best.path[0].new and best.at_level.old > best.path[0].old
    assert outcome.repeated == {method.name: True for method in methods}
    shown = screen.getvalue()
    assert all(f"{method.name} " in shown for method in methods) and "the same losses to the bit" in shown
    # A line per method in each panel and in the legend, and a point per learning rate.
    drawn = [element.tag.split("}")[1] for element in ElementTree.parse(tmp_path / "osft.svg").iter()]
    assert drawn.count("circle") == sum(len(outcome.reached(method.name)) for method in methods)


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("method", SPLIT[1:3], ids=lambda method: method.name)
def test_a_drift_of_zero_gives_the_same_logits(method: Method, prepared: bool) -> None:
    batch = Dictionaries(0).batch([NEW, OLD], 4, torch.Generator().manual_seed(0))
    plain, model = osft.new_model(0), osft.new_model(0)
    optimizer = osft.make_optimizer(model, method, 0.0, batch if prepared else None)
    osft.train_step(model, optimizer, batch)  # merges a drift of zero into the weights
    with torch.no_grad():
        expected, got = (m(input_ids=batch["input_ids"], use_cache=False).logits for m in (plain, model))
    assert torch.equal(got, expected)


def test_linear_weights_alone_are_what_osft_splits() -> None:
    (alone,) = [method for method in METHODS if method.osft is not None and method not in SPLIT]

    def trained(method: Method) -> set[str]:
        model = osft.new_model(0)
        osft.make_optimizer(model, method, 1e-3)
        return {name for name, param in model.named_parameters() if param.requires_grad}

    assert [trained(method) for method in SPLIT] == 2 * [trained(FULL)] + 2 * [trained(alone)]
    assert trained(alone) == set(outsize.osft.AdamW(osft.new_model(0), SPLIT[0].osft, lr=1e-3).split_weights)


def test_half_of_the_entries_are_shared_and_the_loss_is_on_the_translation() -> None:
    tasks = Dictionaries(3)
    old, new = tasks.entries
    assert old.sort().values.tolist() == new.sort().values.tolist() == list(range(osft.SYMBOLS))
    assert (old == new).sum() == osft.SYMBOLS * osft.SHARED
    batch = tasks.batch([NEW, OLD], 2, torch.Generator().manual_seed(0))
    for row, task in enumerate([NEW, NEW, OLD, OLD]):
        ids, labels = batch["input_ids"][row], batch["labels"][row]
        words, translation = ids[1 : 1 + osft.LENGTH], ids[-osft.LENGTH :]
        assert ids[0] == osft.SYMBOLS + 1 + task and torch.equal(translation, tasks.entries[task][words])
        assert torch.equal(labels[-osft.LENGTH :], translation) and (labels[: -osft.LENGTH] == -100).all()


def test_losses_of_both_tasks_are_those_of_the_model() -> None:
    model, rng = osft.new_model(0), torch.Generator().manual_seed(0)
    batch = Dictionaries(0).batch([NEW, OLD], 4, rng)
    halves = [{name: batch[name][rows] for name in ("input_ids", "labels")} for rows in (slice(4), slice(4, 8))]
    torch.testing.assert_close(osft.evaluate(model, batch), [model(**half).loss.item() for half in halves])


def test_the_old_loss_is_read_where_the_new_loss_is_the_level() -> None:
    run = run_of((0, 4.0, 0.0), (3, LEVEL + 0.3, 0.1), (6, LEVEL - 0.1, 0.5))
    assert run.at_level is not None
    assert [run.at_level.step, run.at_level.new, run.at_level.old] == pytest.approx([5.25, LEVEL, 0.4])
    assert run_of((0, 4.0, 0.0), (3, LEVEL + 0.1, 0.1)).at_level is None
    assert run_of((0, LEVEL, 0.2)).at_level == Point(0, LEVEL, 0.2)


def test_the_best_learning_rate_forgets_least_on_average_over_all_seeds() -> None:
    def reached(old: float, rate: float, seed: int) -> Run:
        return run_of((0, 4.0, 0.0), (3, LEVEL, old), rate=rate, seed=seed)

    olds = {0.3: (1.0, 1.1), 0.1: (0.1, 1.5)}
    runs = [reached(old, rate, seed) for rate, each in olds.items() for seed, old in enumerate(each)]
    slow = [reached(0.0, 0.03, 0), run_of((0, 4.0, 0.0), (3, 1.0, 0.0), rate=0.03, seed=1)]
    assert [run.rate for run in Outcome(runs + slow, {}).best("full")] == [0.1, 0.1]
    assert Outcome(slow, {}).best("full") == []


def test_the_picture_stays_inside_its_panels() -> None:
    panel = Panel(10, (8.0, 0.5), (0.01, 2.0))
    found = [panel.at(x, 0.01)[0] for x in (8.0, 2.0, 0.5)]
    assert found == pytest.approx([10, 10 + WIDTH / 2, 10 + WIDTH])
    assert panel.at(8.0, 0.01)[1] - panel.at(8.0, 2.0)[1] == pytest.approx(HEIGHT)
    some = Series("a <b>", [(4.0, 0.01), (0.5, 0.3)], [(1e-3, 10.0, 0.3), (3e-4, 30.0, 0.2)], best=3e-4)
    none = Series("never reached", [], [], best=None)
    root = ElementTree.fromstring(picture([some, none], 0.5))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    lines = [element.attrib["points"].split() for element in root.iter() if element.tag.endswith("polyline")]
    points = [tuple(map(float, point.split(","))) for line in lines for point in line]
    assert len(points) > 6 and all(0 < x < width and 0 < y < height for x, y in points)
    assert "a <b>" in [element.text for element in root.iter()]


def test_the_document_has_every_method() -> None:
    text = (Path(__file__).parent.parent / "docs/osft_demo.md").read_text()
    assert all(f"| {method.name} |" in text for method in METHODS)


def test_a_bar_counts_every_step() -> None:
    with Bar("x") as bar:
        weights = osft.learn_old(0, Scale(old_steps=2), bar)
        path = osft.learn_new(FULL, 1e-3, 0, weights, Scale(max_steps=4, every=2), bar)
    assert bar.done == 6 and [point.step for point in path] == [0, 2, 4]
