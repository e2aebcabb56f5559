"""Beyond capacity, on the virtual clock: how many are served in time, and whether clients are told the truth."""

from warmroot.deploy.simulate.overload import Overload


def test_at_three_times_the_capacity_goodput_holds_and_retry_after_is_true():
    fleet = Overload(requests=2400)
    slo, capacity = fleet.slo(), fleet.capacity()
    # All that waits from the beginning is served in a better order than what comes by and by.
    below, above, beyond = (fleet.at(load * capacity, slo) for load in (0.9, 1.5, 3.0))
    assert below["refused_share"] < 0.1
    assert beyond["goodput_rps"] >= 0.9 * max(below["goodput_rps"], above["goodput_rps"])
    told = beyond["retry_after"]
    assert told["clients"] > 100 and told["error_p50"] < 0.5 and told["first_try"] > 0.8
    served = beyond["served_share"]
    assert served["light"] > 0.98 and served["heavy"] < 0.7  # the light tenant asks for less than its part


def test_without_a_bound_nearly_nothing_is_in_time():
    fleet = Overload(requests=2400, bounded=False)
    slo, capacity = fleet.slo(), fleet.capacity()
    assert fleet.at(3 * capacity, slo)["goodput_rps"] < 0.5 * fleet.at(capacity, slo)["goodput_rps"]
