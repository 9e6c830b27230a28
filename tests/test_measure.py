"""Costs that are measured on a store: few calls, bounded keys, checked answers."""

import itertools

import pytest

from kvmask import CostModel
from kvmask.errors import ArgumentError, StoreError


class Asked:
    """A store that has some keys, and a clock that each call moves by what it costs."""

    def __init__(self, monkeypatch, keys=(), call=1e-3, missing=1e-6, present=4e-6):
        self.keys, self.calls, self.now = set(keys), [], 0.0
        self.costs = call, missing, present
        monkeypatch.setattr("kvmask.plans.costs.time.perf_counter", lambda: self.now)

    def batch_is_exist(self, keys):
        call, missing, present = self.costs
        answer = [int(key in self.keys) for key in keys]
        self.now += call + present * sum(answer) + missing * (len(keys) - sum(answer))
        self.calls.append(list(keys))
        return answer


def test_times_come_from_the_calls(monkeypatch):
    store = Asked(monkeypatch)
    costs = CostModel.measure(store)
    assert costs.call == pytest.approx(1e-3)
    assert costs.missing == pytest.approx(1e-6)
    assert costs.present == CostModel().present  # none was named
    assert costs.miss_rate == CostModel().miss_rate
    assert costs.first_batch == pytest.approx(1000, abs=1)
    assert [len(keys) for keys in store.calls] == [1] * 5 + [512] * 5
    assert len(set(itertools.chain(*store.calls))) == 512


def test_keys_that_are_there_count_too(monkeypatch):
    store = Asked(monkeypatch, keys=[f"k{i}" for i in range(0, 100, 2)])
    named = [f"k{i}" for i in range(100)]
    costs = CostModel.measure(store, present_keys=named, num_keys=50, rounds=2, miss_rate=0.5)
    assert costs.present == pytest.approx(4e-6)
    assert costs.miss_rate == 0.5
    # The first call finds out which of the first 50 are there; later ones ask for those alone.
    assert [len(keys) for keys in store.calls] == [50, 1, 1, 50, 50, 25, 25]
    costs = CostModel.measure(store, present_keys=["absent"])
    assert costs.present == CostModel().present


def test_a_clock_that_stands_still_gives_usable_times(monkeypatch):
    store = Asked(monkeypatch, keys=["k"], call=0, missing=0, present=0)
    costs = CostModel.measure(store, present_keys=["k"])
    assert costs.call > 0
    assert costs.missing > 0
    assert costs.present > 0
    assert costs.first_batch == 1


@pytest.mark.parametrize("answer", [[], [0, 0], [-900], [2]])
def test_an_answer_that_is_none_is_not_measured(answer):
    class Broken:
        def batch_is_exist(self, keys):
            return answer

    with pytest.raises(StoreError, match="the store must answer 0 or 1 for each of 1 keys"):
        CostModel.measure(Broken())


@pytest.mark.parametrize(
    ("name", "value"), [("num_keys", 1), ("num_keys", 1 << 17), ("rounds", 0), ("rounds", 1001)]
)
def test_bounds(monkeypatch, name, value):
    with pytest.raises(ArgumentError, match=f"`{name}` must"):
        CostModel.measure(Asked(monkeypatch), **{name: value})


@pytest.mark.store
def test_a_real_store(live_store):
    keys = [f"measured/{i}" for i in range(64)]
    for key in keys:
        assert live_store.put(key, b"x") == 0
    costs = CostModel.measure(live_store, present_keys=keys)
    assert min(costs.call, costs.missing, costs.present) > 0
    assert live_store.batch_is_exist(keys) == [1] * 64
